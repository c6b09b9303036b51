// An infinite gradient of one rank that arrives at the end of backward, when states on tiers have been updated.
#include <gmock/gmock.h>

#include <chrono>
#include <limits>
#include <thread>

#include "support/offload_test.hpp"

namespace zr::test {
namespace {

using engine_tests::Run;
using ::testing::HasSubstr;

class LateInfinityTest : public OffloadTest {
 protected:
  static constexpr const char* kModel = "parity.model=wide train.gradient_accumulation=1 ";
  static constexpr const char* kAged = ZR_BUILD_DIR "/tests/plugins/zr_optimizer_aged.so ";
};

// In the third step, the last gradient of backward is infinite on the last rank. Both ranks pause before the gradients
// of two layers, so that the buckets of the other layers are reduced and states of their elements updated.
RANK_BODY(has_a_late_infinite_gradient, Run) {
  run.build();
  zr::Engine& engine = *run.engine;
  const auto parameters = run.model->named_parameters();
  const auto pause = [&] {
    if (engine.step_index() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  };
  parameters["line0.weight"].register_hook([&](const torch::Tensor& gradient) {
    pause();
    return gradient;
  });
  parameters["in.weight"].register_hook([&](const torch::Tensor& gradient) {
    pause();
    const bool infinite = engine.step_index() == 2 && engine.rank() + 1 == engine.world();
    return infinite ? torch::full_like(gradient, std::numeric_limits<float>::infinity()) : gradient;
  });
  run.train();
}

TEST_F(LateInfinityTest, ASkippedStepLeavesStatesOnTiersAsTheyWere) {
  const std::string common = std::string(kModel) + "train.steps=4 strategy=zero2 ";
  train(2, has_a_late_infinite_gradient, "device", common);
  for (const std::string tier : {"cpu", "nvme"}) {
    train(2, has_a_late_infinite_gradient, tier, common + states(tier));
    EXPECT_EQ(summary(tier)["skipped"], 1) << tier;
    EXPECT_EQ(hash(tier), hash("device")) << tier;
    EXPECT_EQ(losses(tier), losses("device")) << tier;
  }
}

TEST_F(LateInfinityTest, StopsAnUpdateInPlaceAndTheCheckpointResumes) {
  const std::string common = std::string(kModel) + "train.steps=4 strategy=zero2 ";
  train(2, engine_tests::trains, "plain", common);
  for (const std::string tier : {"cpu", "nvme"}) {
    fs::remove_all(scratch_.path("c"));
    const std::string how =
        common + "train.nonfinite=stop checkpoint.dir=c checkpoint.every=2 job.name=" + tier + states(tier);
    const Outcome stopped = shell(launch(2, has_a_late_infinite_gradient, how));
    EXPECT_EQ(stopped.code, 2) << tier << stopped.output;
    EXPECT_THAT(stopped.output, HasSubstr("step 3: the reduced gradient of 'in.weight' is not finite")) << tier;
    EXPECT_THAT(stopped.output, HasSubstr("train.nonfinite = \"stop\" (command line)")) << tier;
    const Outcome rest = shell(launch(2, engine_tests::trains, how + " checkpoint.resume=true"));
    ASSERT_EQ(rest.code, 0) << tier << rest.output;
    EXPECT_EQ(hash(tier), hash("plain")) << tier;
  }
}

TEST_F(LateInfinityTest, AnOptimizerWithStateOfItsOwnIsUpdatedEarlyWhereNoStepIsVoid) {
  const std::string common =
      std::string(kModel) + "train.steps=4 train.dtype=bf16 strategy=zero2 train.nonfinite=stop optimizer=" + kAged;
  train(2, engine_tests::trains, "after", common + "offload.overlap=false" + states("cpu"));
  for (const std::string tier : {"cpu", "nvme"}) {
    train(2, engine_tests::trains, tier, common + states(tier));
    EXPECT_EQ(number(tier, "/overlap/updates_early"), 3) << tier;
    EXPECT_EQ(hash(tier), hash("after")) << tier;
    EXPECT_EQ(losses(tier), losses("after")) << tier;
  }
}

}  // namespace
}  // namespace zr::test
