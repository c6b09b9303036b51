// Optimizers whose states are not elementwise, or which need sums over full parameters: the weights depend neither on
// the strategy nor on the number of ranks, the tiers or a resume.
#include "multirank/engine/printed_result.hpp"

namespace {

using namespace engine_tests;

class EngineOptimizersTest : public PrintedResultTest, public ::testing::WithParamInterface<const char*> {
 protected:
  // "everything": matrices of which some are cut into blocks of rows, others only between parameters; vectors, an
  // unused and a frozen parameter; one that only some micro-batches use. Small parameters have 8-bit states too. Muon
  // updates the matrices, AdamW the rest.
  std::string job(const std::string& more, int steps = 6) const {
    std::string keys = "train.steps=" + std::to_string(steps) + " optimizer=" + GetParam() + " ";
    if (GetParam() == std::string("adamw8bit")) keys += "optimizer.adamw8bit.min_8bit_elements=100 ";
    if (GetParam() == std::string("muon"))
      keys +=
          "'optimizer.groups=[{match=[\"*.bias\",\"*norm.*\",\"scalar\",\"embedding.weight\"],use=\"adamw\",lr_scale=0."
          "1,beta1=0.8}]' ";
    return keys + more;
  }
  std::string nvme() const { return " offload.nvme.path=" + (folder_ / "swap").string(); }
};

RANK_BODY(trains_with_optimizer, Run) {
  run.build();
  run.train();
  print_hash(run);
}

TEST_P(EngineOptimizersTest, GiveTheSameWeightsUnderEveryStrategy) {
  for (const std::string dtype : {"train.dtype=fp32 ", "train.dtype=bf16 "}) {
    const std::string expected =
        result_of(1, trains_with_optimizer, job(dtype + "train.gradient_accumulation=4 strategy=zero0"));
    for (const std::string& strategy : kLayouts)
      EXPECT_EQ(result_of(2, trains_with_optimizer, job(dtype + "train.gradient_accumulation=2 " + strategy)), expected)
          << dtype << strategy;
    EXPECT_EQ(result_of(4, trains_with_optimizer, job(dtype + "strategy=zero1")), expected);
    EXPECT_EQ(result_of(4, trains_with_optimizer, job(dtype + "strategy=zero3")), expected);
    EXPECT_EQ(result_of(3, trains_with_optimizer, job(dtype + "train.gradient_accumulation=2 strategy=zero2")),
              result_of(1, trains_with_optimizer, job(dtype + "train.gradient_accumulation=6")));
  }
}

TEST_P(EngineOptimizersTest, GiveTheSameWeightsInFp16) {
  const std::string dtype = "train.dtype=fp16 train.gradient_accumulation=2 ",
                    expected = result_of(2, trains_with_optimizer, job(dtype + "strategy=zero0"));
  EXPECT_EQ(result_of(2, trains_with_optimizer, job(dtype + "strategy=zero2 offload.optimizer=cpu")), expected);
  EXPECT_EQ(result_of(2, trains_with_optimizer, job(dtype + "strategy=zero3")), expected);
}

TEST_P(EngineOptimizersTest, GiveTheSameWeightsOnEveryTier) {
  fs::create_directories(folder_ / "swap");
  for (const std::string dtype : {"train.dtype=fp32 ", "train.dtype=bf16 "}) {
    const std::string expected = result_of(2, trains_with_optimizer, job(dtype + "strategy=zero1"));
    EXPECT_EQ(result_of(2, trains_with_optimizer, job(dtype + "strategy=zero2 offload.optimizer=cpu")), expected);
    EXPECT_EQ(result_of(2, trains_with_optimizer, job(dtype + "strategy=zero3 offload.optimizer=nvme" + nvme())),
              expected);
    EXPECT_EQ(result_of(2, trains_with_optimizer,
                        job(dtype +
                            "strategy=zero2 offload.optimizer=nvme offload.device_fraction=0.3 "
                            "offload.gradients=nvme" +
                            nvme())),
              expected);
    EXPECT_EQ(result_of(2, trains_with_optimizer,
                        job(dtype +
                            "strategy=zero3 offload.optimizer=cpu offload.parameters=nvme "
                            "offload.gradients=cpu" +
                            nvme())),
              expected);
  }
}

// Three steps, saved; the rest on another number of ranks, under another strategy and on another tier.
TEST_P(EngineOptimizersTest, ResumeOnAnotherNumberOfRanks) {
  fs::create_directories(folder_ / "swap");
  for (const std::string dtype : {"train.dtype=fp32 ", "train.dtype=bf16 "}) {
    const std::string dir = "checkpoint.dir=" + (folder_ / ("saved_" + dtype.substr(12, 4))).string() + " ",
                      expected = result_of(2, trains_with_optimizer,
                                           job(dtype + "train.gradient_accumulation=2 strategy=zero1"));
    result_of(2, trains_with_optimizer,
              job(dtype + "train.gradient_accumulation=2 strategy=zero3 checkpoint.every=3 offload.optimizer=nvme " +
                      dir + nvme(),
                  3));
    for (const std::string way :
         {"1 train.gradient_accumulation=4 strategy=zero0", "4 strategy=zero3 offload.optimizer=cpu"})
      EXPECT_EQ(result_of(way[0] - '0', trains_with_optimizer, job(dtype + dir + way.substr(2))), expected) << way;
  }
}

class EngineMuonTest : public EngineOptimizersTest {
 protected:
  std::string in_bf16(const std::string& more, int steps = 6) const {
    return job("optimizer.muon.precision=bf16 " + more, steps);
  }
  // oneDNN restricts itself to these instructions, on every processor.
  static constexpr const char* kWithoutBf16 = "ONEDNN_MAX_CPU_ISA=AVX2";
};

TEST_P(EngineMuonTest, GivesTheSameWeightsUnderEveryStrategyInBf16) {
  const std::string expected = result_of(1, trains_with_optimizer, in_bf16("train.gradient_accumulation=4"));
  EXPECT_NE(result_of(1, trains_with_optimizer, job("train.gradient_accumulation=4")), expected) << "in fp32";
  for (const std::string& strategy : kLayouts)
    EXPECT_EQ(result_of(2, trains_with_optimizer, in_bf16("train.gradient_accumulation=2 " + strategy)), expected)
        << strategy;
  EXPECT_EQ(result_of(4, trains_with_optimizer, in_bf16("strategy=zero1 offload.optimizer=cpu")), expected);
}

TEST_P(EngineMuonTest, SaysOnceThatBf16IsSlowWithoutBf16Products) {
  const std::string line =
      "zeroth: optimizer.muon.precision = \"bf16\": this processor has no bf16 matrix products, so muon rounds "
      "to bf16 and multiplies in fp32, which is slower than precision = \"fp32\"";
  const std::string two_groups =
      "'optimizer.groups=[{match=[\"*.bias\",\"*norm.*\",\"scalar\",\"embedding.weight\"],use=\"adamw\"},"
      "{match=\"large.weight\",lr_scale=0.5}]' ";
  const auto lines = [&](const std::string& precision) {
    const Result done = launch(
        2,
        program(2, trains_with_optimizer,
                "strategy=zero0 train.steps=2 optimizer=muon " + two_groups + "optimizer.muon.precision=" + precision),
        kWithoutBf16);
    EXPECT_EQ(done.code, 0) << done.output;
    std::size_t found = 0;
    for (std::size_t at = 0; (at = done.output.find(line, at)) != std::string::npos; ++at) ++found;
    return found;
  };
  EXPECT_EQ(lines("bf16"), 1u);
  EXPECT_EQ(lines("fp32"), 0u);
}

// Matrices of 36 x 36 and 36 x 577; oneDNN needs no memory of its own for AVX2.
TEST_P(EngineMuonTest, CountsTheMemoryOfItsProducts) {
  const Result done = launch(1, program(1, trains_with_optimizer, in_bf16("job.threads=1", 2)), kWithoutBf16);
  ASSERT_EQ(done.code, 0) << done.output;
  constexpr int64_t kSquare = 36 * 36 * 4, kWide = (36 * 577 * 4 + 63) / 64 * 64;
  EXPECT_EQ(summary()["memory"]["host"]["other"]["peak"], (3 * kSquare + 2 * kSquare) + (3 * kWide + 2 * kSquare));
}

TEST_P(EngineMuonTest, EndsTheJobIfItsProductsExceedTheBudget) {
  const Result done = launch(1, program(1, trains_with_optimizer, job("memory.host_budget=200KiB", 2)), kWithoutBf16);
  EXPECT_EQ(done.code, 2);
  EXPECT_NE(done.output.find("KiB of it are 'other: muon workspaces', which a plug-in allocates while it works: the "
                             "plan does not include them"),
            std::string::npos)
      << done.output;
}

const auto optimizer_of = [](const auto& info) { return std::string(info.param); };
INSTANTIATE_TEST_SUITE_P(All, EngineMuonTest, ::testing::Values("muon"), optimizer_of);

INSTANTIATE_TEST_SUITE_P(All, EngineOptimizersTest, ::testing::Values("adamw8bit", "muon"), optimizer_of);
INSTANTIATE_TEST_SUITE_P(SLOW_All, EngineOptimizersTest, ::testing::Values("lamb", "adafactor"), optimizer_of);

}  // namespace
