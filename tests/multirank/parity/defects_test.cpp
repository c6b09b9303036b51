// Shows that the parity matrix detects errors: cases with a defect in a plug-in, and the same cases without it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "multirank/parity/matrix.hpp"
#include "multirank/parity/run_cases.hpp"

namespace {

using parity::test_case;
using parity::TestCase;
using parity::with;

class ParityDefectsTest : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(folder_); }
  // Each case is exact with `plugin`; with `defect` added each case differs, and its problem contains `says`.
  void expect_seen(const std::vector<std::vector<std::string>>& cases, const std::string& plugin,
                   const std::string& defect, const std::string& says) const {
    std::vector<TestCase> all;
    for (const auto& choices : cases) all.push_back(with(test_case(choices), "sound", plugin));
    for (const auto& choices : cases) all.push_back(with(test_case(choices), "defect", plugin + " " + defect));
    const auto problems = parity::run_cases(all, folder_);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      EXPECT_EQ(problems[i], "") << all[i].name();
      const std::string& seen = problems[cases.size() + i];
      EXPECT_NE(seen.find(says), std::string::npos) << all[cases.size() + i].name() << ": '" << seen << "'";
    }
  }
  const std::string folder_ =
      (std::filesystem::path(testing::TempDir()) / ("defects-" + std::to_string(::getpid()))).string();
};

const std::vector<std::string> kStrategies{"zero0", "zero1", "zero2", "zero3"};

TEST_F(ParityDefectsTest, SLOW_DetectsADroppedBucket) {
  std::vector<std::vector<std::string>> cases;
  for (const std::string& strategy : kStrategies) {
    cases.push_back({strategy, "used_twice", "n2"});
    cases.push_back({strategy, "used_twice", "n3", "bf16", "sgd", "a4"});
  }
  expect_seen(cases, "communicator=faulty", "communicator.faulty.drops=reduce_bucket_0", "step ");
}

TEST_F(ParityDefectsTest, DetectsAStalePersistentParameter) {
  expect_seen({{"zero3", "used_twice", "n2"}, {"zero3", "lstm", "n3", "bf16"}, {"zero3", "tied", "n4", "fp16"}},
              "communicator=faulty", "communicator.faulty.drops=all_gather_persistent_weights",
              "weights differ between ranks: in '");  // the weight digest of the engine finds it during the run
}

TEST_F(ParityDefectsTest, DetectsAMissedUnscaleAtFp16) {
  std::vector<std::vector<std::string>> cases;
  for (const std::string& strategy : kStrategies) cases.push_back({strategy, "tied", "n2", "fp16", "sgd"});
  expect_seen(cases, "optimizer=unscaled", "optimizer.unscaled.missed=1024", "step 1: ");
}

TEST_F(ParityDefectsTest, SLOW_DetectsAnotherRankOrderAtThreeRanks) {
  std::vector<std::vector<std::string>> cases;
  for (const std::string& strategy : kStrategies)
    for (const std::string reduce : {"each", "last"}) cases.push_back({strategy, reduce, "everything", "n3", "sgd"});
  expect_seen(cases, "communicator=faulty", "communicator.faulty.backwards=true", "step 1: ");
}

// The addition of two values commutes, so the matrix needs three ranks.
TEST_F(ParityDefectsTest, CannotDetectAnotherRankOrderAtTwoRanks) {
  const auto problems = parity::run_cases({with(test_case({"zero2", "everything", "n2", "sgd"}), "defect",
                                                "communicator=faulty communicator.faulty.backwards=true")},
                                          folder_);
  EXPECT_EQ(problems, std::vector<std::string>{""});
}

TEST_F(ParityDefectsTest, ReportsTheOutputOfRanksThatFail) {
  const auto problems = parity::run_cases({with(test_case({"zero2", "tied", "n2"}), "wrong", "optimizer.lr=fast"),
                                           test_case({"zero2", "tied", "n2", "sgd"})},
                                          folder_);
  EXPECT_NE(problems[0].find("the ranks failed: "), std::string::npos) << problems[0];
  EXPECT_NE(problems[0].find("optimizer.lr"), std::string::npos) << problems[0];
  EXPECT_EQ(problems[1], "") << "the next test case is still trained";
}

}  // namespace
