// The statistics of a step, on one rank.
#include "engine/step_sync.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;

struct StepSyncFixture {
  StepSyncFixture() { fill(2); }
  void fill(float gradient) {
    for (const update::UpdateSlice& slice : state.slices())
      std::fill_n(static_cast<float*>(slice.grad.data), slice.grad.count, gradient);
  }
  engine::GlobalStats exchange(const std::vector<double>& losses, const std::vector<double>& weights) {
    return sync.exchange({{losses.begin(), losses.end()}, weights, 7, &touched, -1});
  }
  OneRankJob rig;
  state::ShardedState state{rig.context(), rig.job.host, rig.job.plugins.tiers, nullptr};
  engine::StepSync sync{rig.context(), state.slices(), nullptr, nullptr};
  std::vector<char> touched{0, 1};
};

TEST(StepSyncTest, TotalsAddWeightsAndKeepTouchedParameters) {
  const StepSyncFixture f;
  const engine::StepSync::Totals totals = f.sync.totals({1, 0.5, 2}, {0, 1});
  EXPECT_EQ(totals.weight, 3.5);
  EXPECT_EQ(totals.touched, (std::vector<char>{0, 1}));
}

TEST(StepSyncTest, LossIsTheMeanWeightedByMicroBatch) {
  StepSyncFixture f;
  const engine::GlobalStats global = f.exchange({1, 4}, {1, 3});
  EXPECT_EQ(global.loss, 13.0 / 4);
  EXPECT_EQ(global.weight, 4);
  EXPECT_EQ(global.tokens, 7);
  EXPECT_EQ(global.loss_rank, -1);
  EXPECT_EQ(global.touched, f.touched);
}

TEST(StepSyncTest, IgnoresTheLossOfAMicroBatchOfWeightZero) {
  StepSyncFixture f;
  const engine::GlobalStats global = f.exchange({1, NAN}, {2, 0});
  EXPECT_EQ(global.loss, 1);
  EXPECT_EQ(global.loss_rank, -1);
}

TEST(StepSyncTest, NamesTheRankWhoseLossIsNotFinite) {
  StepSyncFixture f;
  EXPECT_EQ(f.exchange({1, NAN}, {1, 1}).loss_rank, 0);
}

TEST(StepSyncTest, AddsTheSquaresOfReducedGradients) {
  StepSyncFixture f;
  const engine::GlobalStats global = f.exchange({1}, {1});
  EXPECT_EQ(global.sum_of_squares, 4 * 1540);
  EXPECT_EQ(global.non_finite, 0);
  EXPECT_EQ(global.first_param, -1);
}

TEST(StepSyncTest, CountsNonFiniteElementsAndNamesTheirFirstParameter) {
  StepSyncFixture f;
  for (const update::UpdateSlice& slice : f.state.slices())
    if (slice.param == 1) static_cast<float*>(slice.grad.data)[0] = INFINITY;
  const engine::GlobalStats global = f.exchange({1}, {1});
  EXPECT_GE(global.non_finite, 1);
  EXPECT_EQ(global.first_param, 1);
}

TEST(StepSyncTest, NamesTheParameterWhoseOwnGradientWasNotFinite) {
  StepSyncFixture f;
  const engine::GlobalStats global = f.sync.exchange({{1}, {1}, 0, &f.touched, 1, 15, true});
  EXPECT_EQ(global.first_local_param, 1);
  EXPECT_EQ(global.non_finite_rank, 0);
  EXPECT_EQ(global.stop, 15);
  EXPECT_TRUE(global.save_failed);
}

TEST(StepSyncTest, ReadsNoReducedGradientsInAStepThatHasNone) {
  StepSyncFixture f;
  f.fill(NAN);
  engine::StepSync::LocalStats own{{1}, {1}, 0, &f.touched, -1};
  own.local_non_finite = 0;
  const engine::GlobalStats finite = f.sync.exchange(own);
  EXPECT_EQ(finite.non_finite, 0);
  EXPECT_EQ(finite.first_param, -1);
  EXPECT_TRUE(std::isnan(finite.sum_of_squares));
  EXPECT_FALSE(finite.masters_changed);
  own.local_non_finite = 3;
  own.first_non_finite = 1;
  own.masters_changed = true;
  const engine::GlobalStats overflow = f.sync.exchange(own);
  EXPECT_EQ(overflow.non_finite, 3);
  EXPECT_EQ(overflow.first_param, 1);
  EXPECT_EQ(overflow.non_finite_rank, 0);
  EXPECT_TRUE(overflow.masters_changed);
}

}  // namespace
}  // namespace zr::testing
