// Gradients on their way from autograd to what the strategy sums, on one rank.
#include "engine/gradient_flow.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "state/sharded_state.hpp"
#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;
using ::testing::HasSubstr;

struct GradientFlowFixture {
  explicit GradientFlowFixture(const std::vector<std::string>& overrides = {}) : rig(overrides) {}
  // One backward in which the parameters get gradients of these values, in this order.
  void backward(const std::vector<std::pair<uint32_t, float>>& gradients, uint32_t micro = 0, bool counts = true) {
    flow.begin(micro, counts);
    for (const auto& [param, value] : gradients) rig.model.give_gradient(param, value);
    flow.end();
  }
  void finish() {
    CallError error;
    const zr_use use = rig.context().use_of(ZR_UPDATE_PHASE);
    rig.context().check(rig.context().strategy.grads_finish(&use, &error), error, "grads_finish");
    rig.context().report_event(ZR_STEP_END);
  }
  // The reduced gradient.
  std::vector<float> sum(uint32_t param) {
    return full_tensor(state, rig.model, param, state::LogicalTensor::gradient);
  }
  OneRankJob rig;
  state::ShardedState state{rig.context(), rig.job.host, rig.job.plugins.tiers, nullptr};
  engine::GradientFlow flow{rig.context(), state.disk_buffers()};
};

class GradientFlowStrategyTest : public ::testing::TestWithParam<const char*> {
 protected:
  std::vector<std::string> strategy() const { return {std::string("strategy=") + GetParam()}; }
};

TEST_P(GradientFlowStrategyTest, HandsEveryGradientToTheStrategy) {
  GradientFlowFixture f(strategy());
  f.backward({{1, 0.5f}, {0, 2}});
  f.finish();
  EXPECT_EQ(f.sum(0), std::vector<float>(1500, 2));
  EXPECT_EQ(f.sum(1), std::vector<float>(40, 0.5f));
  EXPECT_EQ(f.flow.touched(), (std::vector<char>{1, 1}));
}

TEST_P(GradientFlowStrategyTest, TakesZerosForAMissingGradient) {
  GradientFlowFixture f(strategy());
  f.backward({{1, 0.5f}, {0, 2}});
  f.finish();
  f.backward({{1, 0.25f}});
  f.finish();
  EXPECT_EQ(f.sum(0), std::vector<float>(1500, 0));
  EXPECT_EQ(f.sum(1), std::vector<float>(40, 0.25f));
  EXPECT_EQ(f.flow.touched(), (std::vector<char>{0, 1}));
}

TEST_P(GradientFlowStrategyTest, AddsUpMicroSteps) {
  std::vector<std::string> overrides = strategy();
  overrides.push_back("train.gradient_accumulation=2");
  GradientFlowFixture f(overrides);
  f.backward({{1, 1}, {0, 2}}, 0);
  f.backward({{1, 3}}, 1);
  f.finish();
  EXPECT_EQ(f.sum(0), std::vector<float>(1500, 2));
  EXPECT_EQ(f.sum(1), std::vector<float>(40, 4));
  EXPECT_EQ(f.flow.touched(), (std::vector<char>{1, 1}));
}

TEST_P(GradientFlowStrategyTest, TakesZerosForAMicroBatchOfWeightZero) {
  GradientFlowFixture f(strategy());
  f.backward({{1, NAN}, {0, 2}}, 0, false);
  f.finish();
  EXPECT_EQ(f.sum(0), std::vector<float>(1500, 0));
  EXPECT_EQ(f.sum(1), std::vector<float>(40, 0));
  EXPECT_EQ(f.flow.touched(), (std::vector<char>{0, 0}));
}

TEST(GradientFlowTest, DropsGradientsOnceTheyAreCopied) {
  GradientFlowFixture f;
  f.flow.begin(0, true);
  f.rig.model.give_gradient(1, 1);
  EXPECT_EQ(f.rig.model.dropped, (std::vector<uint32_t>{1}));
}

TEST(GradientFlowTest, WithoutOverlapCollectsGradientsAtEndOfBackward) {
  GradientFlowFixture f({"gradients.overlap=false"});
  f.flow.begin(0, true);
  f.rig.model.give_gradient(1, 1);
  EXPECT_TRUE(f.rig.model.dropped.empty());
  f.flow.end();
  EXPECT_EQ(f.rig.model.dropped.size(), 2u);
}

TEST(GradientFlowTest, RejectsAGradientOutsideBackward) {
  GradientFlowFixture f;
  EXPECT_THAT(failure_of([&] { f.rig.model.give_gradient(0, 1); }),
              HasSubstr("backward() ran outside engine.backward() and computed a gradient for 'a'"));
}

TEST(GradientFlowTest, RejectsAGradientOfAnotherEnginesBackward) {
  GradientFlowFixture f, other;
  const auto fails_with = [&](const char* text) {
    EXPECT_THAT(failure_of([&] { f.rig.model.give_gradient(0, 1); }), HasSubstr(text));
  };
  other.flow.begin(0, true);
  fails_with(
      "the backward() of another zr::Engine computed a gradient for 'a'; call requires_grad_(false) on the parameters "
      "of this model before the other engine's loss is computed, and requires_grad_(true) after its backward()");
  other.flow.end();
  fails_with("backward() ran outside engine.backward()");
  {
    GradientFlowFixture destroyed;
    destroyed.flow.begin(0, true);
  }
  other.flow.begin(0, true);
  EXPECT_TRUE(other.flow.cancel());
  fails_with("backward() ran outside engine.backward()");
}

TEST(GradientFlowTest, RejectsASecondGradientOfOneBackward) {
  GradientFlowFixture f;
  f.flow.begin(0, true);
  f.rig.model.give_gradient(1, 1);
  EXPECT_THAT(failure_of([&] { f.rig.model.give_gradient(1, 1); }), HasSubstr("'b' received a second gradient"));
}

TEST(GradientFlowTest, CancelsAMicroStepBeforeItsFirstGradientOnly) {
  GradientFlowFixture f;
  f.flow.begin(0, true);
  EXPECT_TRUE(f.flow.cancel());
  f.flow.begin(0, true);
  f.rig.model.give_gradient(1, 1);
  EXPECT_FALSE(f.flow.cancel());
}

TEST(GradientFlowTest, FindsFirstNonFiniteParameterIfChecksAreEnabled) {
  GradientFlowFixture f;
  f.backward({{1, INFINITY}, {0, 1}});
  f.finish();
  EXPECT_EQ(f.flow.first_non_finite(), -1);
  f.flow.check_non_finite(true);
  f.backward({{1, INFINITY}, {0, 1}});
  f.finish();
  EXPECT_EQ(f.flow.first_non_finite(), 1);
  f.backward({{1, INFINITY}, {0, NAN}});
  f.finish();
  EXPECT_EQ(f.flow.first_non_finite(), 0);
}

TEST(GradientFlowTest, UnregistersCallbackOnDestruction) {
  OneRankJob rig;
  state::ShardedState state(rig.context(), rig.job.host, rig.job.plugins.tiers, nullptr);
  {
    const engine::GradientFlow flow(rig.context(), nullptr);
    EXPECT_TRUE(rig.model.arrived);
  }
  EXPECT_FALSE(rig.model.arrived);
}

INSTANTIATE_TEST_SUITE_P(Strategies, GradientFlowStrategyTest, ::testing::Values("zero0", "zero1", "zero2", "zero3"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace zr::testing
