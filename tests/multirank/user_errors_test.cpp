// Mistakes of a program that uses zr::Engine: exit codes, messages, and what still works afterwards.
#include <gmock/gmock.h>

#include "multirank/engine_fixture.hpp"

namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class UserErrorsTest : public engine_tests::EngineTest {
 protected:
  UserErrorsTest() { binary_ = "user_errors_case"; }
  // The lines that rank 0 printed, without the launcher's.
  static std::string said(const engine_tests::Result& result) {
    std::string own;
    for (const auto& line : result.lines())
      if (line.rfind('[', 0) != 0 && line.rfind("zeroth:", 0) != 0) own += line + "\n";
    return own;
  }
  std::string passes(int ranks, const std::string& name, const std::string& overrides) {
    const engine_tests::Result result = run(ranks, name, overrides);
    EXPECT_EQ(result.code, 0) << name << " on " << ranks << ", " << overrides << "\n" << result.output;
    return said(result);
  }
  // zero3 that gathers every weight for each use, so that differences between ranks show in a small model too.
  const std::string gathers_ =
      "strategy=zero3 communicator.share_weights=false strategy.zero3.max_live_bytes=0B "
      "strategy.zero3.max_reuse_bytes=0B strategy.zero3.prefetch_bytes=0B";
  std::vector<std::string> strategies() const {
    return {"strategy=zero0", "strategy=zero1 communicator.share_weights=false",
            "strategy=zero1", "strategy=zero2 communicator.share_weights=false",
            "strategy=zero2", "strategy=zero3",
            gathers_};
  }
};

TEST_F(UserErrorsTest, ReportCallAndRemedy) { check_messages("user_errors.txt", 40); }

TEST_F(UserErrorsTest, PrintsTheLibtorchStackOnRequest) {
  const auto plain = run(1, "wrong_shape", "strategy=zero0");
  EXPECT_EQ(plain.output.find("Exception raised from"), std::string::npos) << plain.output;
  const auto full = shell("TORCH_SHOW_CPP_STACKTRACES=1 " + program(1, "wrong_shape", "strategy=zero0"));
  EXPECT_EQ(full.code, 1);
  EXPECT_THAT(full.output, HasSubstr("Exception raised from"));
}

TEST_F(UserErrorsTest, CollectiveCallOnOneRankFailsUnderEveryStrategy) {
  for (const auto& strategy : strategies())
    for (const std::string name : {"get", "set", "hash", "mean", "save", "finish", "release", "gather", "evaluation"}) {
      const auto result = run(2, "rank0_" + name, strategy);
      EXPECT_EQ(result.code, 4) << name << ", " << strategy << "\n" << result.output;
      EXPECT_THAT(result.output, HasSubstr(" is collective: call it on all ranks")) << name << ", " << strategy;
    }
}

TEST_F(UserErrorsTest, MistakesBeforeGradientsAreReducedChangeNothing) {
  for (const auto& strategy : strategies())
    for (const std::string accumulation : {"1", "2"})
      for (const int ranks : {1, 2})
        passes(ranks, "goes_on_after_mistakes", strategy + " train.gradient_accumulation=" + accumulation);
}

TEST_F(UserErrorsTest, MicroBatchOfWeightZeroHasNoEffect) {
  const std::string reference = passes(1, "empty_micro_batch", "strategy=zero0 train.gradient_accumulation=3");
  const auto expect_same = [&](int ranks, const std::string& how) {
    const std::string all = how + " train.gradient_accumulation=" + std::to_string(4 / ranks);
    EXPECT_EQ(passes(ranks, "empty_micro_batch", all), reference) << ranks << " ranks, " << all;
  };
  for (const auto& strategy : strategies()) {
    for (const int ranks : {1, 2, 4}) expect_same(ranks, strategy);
    expect_same(4, strategy + " gradients.reduce=last_micro_step");
  }
  for (const int ranks : {1, 2}) {
    const std::string text = passes(ranks, "nothing_weighs", "strategy=zero1");
    EXPECT_THAT(text, HasSubstr("for step 1 add up to 0 over all ranks and micro-batches"));
  }
}

TEST_F(UserErrorsTest, ReleaseReturnsFullWeights) {
  const std::string descent =
      "train.gradient_accumulation=1 optimizer=sgd optimizer.sgd.momentum=0.0 optimizer.sgd.nesterov=false "
      "optimizer.sgd.weight_decay=0.0 ";
  const std::string reference = passes(1, "follows_torch", descent + "strategy=zero0");
  EXPECT_EQ(reference, "");
  for (const auto& strategy : strategies()) passes(1, "follows_torch", descent + strategy);
  for (const std::string dtype : {"fp32", "bf16"})
    for (const std::string name : {"own", "master"}) {
      const std::string how = " train.dtype=" + dtype + " job.name=" + name,
                        expected = passes(2, "releases", "strategy=zero0" + how);
      for (const auto& strategy : strategies())
        EXPECT_EQ(passes(2, "releases", strategy + how), expected) << strategy << how;
      const std::string tier = " offload.optimizer=cpu offload.gradients=cpu";
      EXPECT_EQ(passes(2, "releases", "strategy=zero2" + tier + how), expected) << "zero2 with tiers" << how;
      EXPECT_EQ(passes(2, "releases", gathers_ + tier + " offload.parameters=cpu" + how), expected)
          << "zero3 with tiers" << how;
    }
}

TEST_F(UserErrorsTest, ReleaseReturnsFullWeightsFromTiersAndDuringAnAsynchronousSave) {
  fs::create_directory(folder_ / "swap");
  const std::string disk = " offload.nvme.path=" + (folder_ / "swap").string() +
                           " offload.nvme.block_bytes=4KiB offload.nvme.depth=1 offload.optimizer=nvme ",
                    activations = " offload.activations=nvme offload.activation_bytes=1B ",
                    async = " checkpoint.async=true checkpoint.every=1 train.steps=9 checkpoint.dir=";
  int saved = 0;
  const std::string half = "train.dtype=fp16 fp16.initial_scale_power=12 ";
  for (const std::string dtype : {"train.dtype=fp32 ", "train.dtype=bf16 ", half.c_str()})
    for (const std::string name : {"own", "master"}) {
      const std::string how = dtype + "job.name=" + name + " ",
                        expected = passes(2, "releases", how + "strategy=zero0");
      if (dtype == half) {  // the previous test covers the other dtypes
        EXPECT_EQ(passes(2, "releases", how + gathers_), expected) << how;
        EXPECT_EQ(passes(2, "releases", how + "strategy=zero1 offload.optimizer=cpu"), expected) << how;
      }
      EXPECT_EQ(passes(2, "releases", how + "strategy=zero2 offload.gradients=nvme" + disk + activations), expected)
          << how;
      const std::string folder = (folder_ / ("async" + std::to_string(++saved))).string();
      EXPECT_EQ(passes(2, "releases", how + gathers_ + " offload.parameters=nvme" + disk + async + folder), expected)
          << how;
    }
  EXPECT_EQ(passes(1, "releases", half + "strategy=zero3 job.name=own" + disk + activations),
            passes(1, "releases", half + "strategy=zero0 job.name=own"));
  EXPECT_TRUE(fs::is_empty(folder_ / "swap")) << "an engine left files in the folder of its tier";
}

TEST_F(UserErrorsTest, LoadInsideEvaluationRestoresTheRandomState) {
  for (const int ranks : {1, 2}) passes(ranks, "load_in_evaluation", "strategy=zero1");
}

TEST_F(UserErrorsTest, ScopesOutliveTheirEngine) {
  for (const auto& strategy : strategies()) passes(2, "outlives", strategy);
}

TEST_F(UserErrorsTest, AcceptsInputsCastToTheEngineDtype) {
  for (const std::string dtype : {"fp32", "bf16", "fp16"}) passes(1, "casts_input", "train.dtype=" + dtype);
}

}  // namespace
