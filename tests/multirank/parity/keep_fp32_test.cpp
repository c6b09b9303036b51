// Parameters that keep fp32 in a 16-bit job (train.keep_fp32): bit-identical to plain libtorch under every strategy and
// tier, on every number of ranks.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "multirank/parity/matrix.hpp"
#include "multirank/parity/run_cases.hpp"

namespace {

using parity::Recipe;
using parity::test_case;
using parity::TestCase;
using parity::with;

class KeepFp32Test : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(folder_); }
  // Norms, and a parameter that is cut between ranks; their buffers keep fp32 too.
  static TestCase keeps(const std::vector<std::string>& choices) {
    return with(test_case(choices), "keeps_fp32",
                "train.keep_fp32=[\"norm.*\",\"batch_norm.*\",\"scalar\"] train.cast_buffers=[]", [](Recipe& r) {
                  r.keeps = "norm.,batch_norm.,scalar";
                  r.rounds_buffers = false;
                });
  }
  void expect_exact(const std::vector<TestCase>& cases) const {
    const auto problems = parity::run_cases(cases, folder_);
    for (std::size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(problems[i], "") << cases[i].name();
  }
  const std::string folder_ =
      (std::filesystem::path(testing::TempDir()) / ("keep-fp32-" + std::to_string(::getpid()))).string();
};

TEST_F(KeepFp32Test, HoldsUnderEveryStrategy) {
  std::vector<TestCase> cases;
  for (const std::string strategy :
       {"zero0", "zero1", "zero2", "zero3", "zero1_shared", "zero2_shared", "zero3_shared", "round_robin"})
    for (const std::string dtype : {"bf16", "fp16"}) cases.push_back(keeps({"everything", strategy, dtype, "n2"}));
  expect_exact(cases);
}

TEST_F(KeepFp32Test, HoldsWithTiersAccumulationAndOtherRanks) {
  std::vector<TestCase> cases;
  for (const std::vector<std::string>& choices :
       std::vector<std::vector<std::string>>{{"zero0", "n1", "bf16"},
                                             {"zero1", "n3", "bf16", "a4", "sgd"},
                                             {"zero2", "n3", "fp16", "a4", "last"},
                                             {"zero3", "n4", "bf16", "a4", "weighted"},
                                             {"zero1", "n2", "bf16", "cpu", "a4"},
                                             {"zero2", "n2", "fp16", "nvme", "a4"},
                                             {"zero2", "n2", "bf16", "both"},
                                             {"zero3", "n2", "bf16", "nvme_all", "a4"},
                                             {"zero3", "n2", "bf16", "nvme_gradients"},
                                             {"zero2", "n2", "bf16", "a4", "bf16_gradients"},
                                             {"zero1", "n2", "bf16", "last", "bf16_gradients"},
                                             {"zero3_shared", "n2", "bf16", "reduce_bf16"},
                                             {"zero0", "n2", "fp16", "overflowing"},
                                             {"zero3_shared", "n2", "fp16", "overflowing", "cpu"}}) {
    std::vector<std::string> all = choices;
    all.push_back("everything");
    cases.push_back(keeps(all));
  }
  expect_exact(cases);
}

}  // namespace
