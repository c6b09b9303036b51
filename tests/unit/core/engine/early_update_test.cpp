// Updates of states in host memory and on disk that begin before all gradients are final, on one rank.
#include "engine/early_update.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "job/early_update_conditions.hpp"
#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;

struct EarlyUpdateFixture {
  explicit EarlyUpdateFixture(const std::vector<std::string>& overrides, Trace* spans = nullptr,
                              const FakeParameters& parameters = {{"a", 1500}, {"b", 40}})
      : rig(overrides, nullptr, parameters), trace(spans) {
    for (const update::UpdateSlice& slice : state.slices())
      std::fill_n(static_cast<float*>(slice.grad.data), slice.grad.count, 2.0f);
  }
  std::vector<update::Optimizer> optimizers() { return {{&rig.context().optimizers[0], nullptr}}; }
  void begin(float grad_mul = 0.5f, int64_t number = 1) {
    early.begin({grad_mul, number, {number, number}, {0.25, 0.25}}, [this](uint32_t param) { return touched[param]; });
  }
  // The gradients of a parameter are reduced.
  void reduce(uint32_t param, bool finite = true) {
    for (const update::UpdateSlice& slice : state.slices())
      if (slice.param == param) early.gradients_reduced(slice.grad.data, slice.grad.count, finite);
  }
  // A collective reads them.
  void read(uint32_t param) {
    for (const update::UpdateSlice& slice : state.slices())
      if (slice.param == param) early.collective_read(slice.grad);
  }
  // A step that only records the order.
  void record() {
    begin();
    reduce(1);
    reduce(0);
    early.finish();
    early.adopt();
  }
  void wait_for_parts(int64_t parts) const {
    while (early.parts_updated() < parts) std::this_thread::yield();
  }
  OneRankJob rig;
  Trace* trace;
  state::ShardedState state{rig.context(), rig.job.host, rig.job.plugins.tiers, nullptr};
  engine::EarlyUpdate early{rig.context(), state, optimizers(), trace};
  std::vector<bool> touched{true, true};
};

std::vector<std::string> in(const std::string& tier, const std::string& folder = "") {
  std::vector<std::string> keys{"offload.optimizer=" + tier, "train.nonfinite=stop"};
  if (tier == "nvme") {
    keys.push_back("offload.nvme.path=" + folder);
    keys.push_back("offload.nvme.block_bytes=4KiB");
    keys.push_back("offload.nvme.depth=1");
  }
  return keys;
}

class EarlyUpdateTest : public ::testing::TestWithParam<const char*> {
 protected:
  test::Scratch scratch_;
  EarlyUpdateFixture f{in(GetParam(), scratch_.folder().string())};
};

// Slices in host memory are updated at once, states on disk in tiles of a norm block. If the part waited for the other
// gradients, wait_for_parts() would not return.
TEST_P(EarlyUpdateTest, UpdatesAPartBeforeTheOtherGradientsAreFinal) {
  using state::LogicalTensor;
  const bool on_disk = GetParam() == std::string("nvme");
  const uint32_t param = on_disk ? 0 : 1;
  const int64_t count = on_disk ? plan::kNormBlock : 40;
  f.record();
  const std::vector<float> before = full_tensor(f.state, f.rig.model, param, LogicalTensor::value);
  const update::UpdateSlice& slice = f.state.slices()[f.state.slices_of(param)[0]];
  f.begin();
  f.early.gradients_reduced(slice.grad.data, count, true);
  f.wait_for_parts(1);
  f.early.finish();
  EXPECT_EQ(*static_cast<const float*>(slice.weight.data), before[0]) << "backward may still use the weights";
  const auto& updated = f.early.adopt();
  EXPECT_EQ(f.early.elements_early(), count);
  EXPECT_EQ(f.early.bytes_early(), count * 8) << "two fp32 states, and no master";
  EXPECT_EQ(f.early.elements(), 1540);
  const std::vector<char>& parts = on_disk ? updated.tiles : updated.staged;
  EXPECT_EQ(parts, on_disk ? (std::vector<char>{1, 0}) : (std::vector<char>{0, 1}));
  // AdamW, first step: exp_avg = 0.1 g, exp_avg_sq = 0.001 g^2 with g = 0.5 * 2.
  const auto state_of = [&](uint32_t of, const std::string& slot) {
    return full_tensor(f.state, f.rig.model, of, LogicalTensor::state, slot)[7];
  };
  EXPECT_FLOAT_EQ(state_of(param, "exp_avg"), 0.1f);
  EXPECT_FLOAT_EQ(state_of(param, "exp_avg_sq"), 0.001f);
  EXPECT_EQ(state_of(1 - param, "exp_avg"), 0.0f);
  const std::vector<float> after = full_tensor(f.state, f.rig.model, param, LogicalTensor::value);
  EXPECT_NEAR(after[7], before[7] - 0.25f * (1 + 0.01f * before[7]), 1e-5) << "lr 0.25, weight decay 0.01";
}

TEST_P(EarlyUpdateTest, OnlyRecordsTheOrderInTheFirstStep) {
  f.record();
  EXPECT_EQ(f.early.parts_updated(), 0);
  EXPECT_EQ(full_tensor(f.state, f.rig.model, 1, state::LogicalTensor::state, "exp_avg")[0], 0.0f);
}

TEST_P(EarlyUpdateTest, LeavesOutPartsOfParametersWithoutAKnownGradient) {
  f.record();
  f.touched[1] = false;
  f.begin();
  f.reduce(1);
  f.reduce(0);
  f.early.finish();
  f.early.adopt();
  EXPECT_EQ(full_tensor(f.state, f.rig.model, 1, state::LogicalTensor::state, "exp_avg")[0], 0.0f);
  EXPECT_FLOAT_EQ(full_tensor(f.state, f.rig.model, 0, state::LogicalTensor::state, "exp_avg")[0], 0.1f);
}

TEST_P(EarlyUpdateTest, CanBeginAgainAfterItWasAbandoned) {
  f.begin();
  f.early.abandon();  // in the step that records the order
  f.record();
  f.begin(1);
  f.early.abandon();
  f.begin();
  f.reduce(0);
  f.reduce(1);
  f.wait_for_parts(2);
  f.early.finish();
  f.early.adopt();
  EXPECT_EQ(f.early.elements_early(), 1540);
  EXPECT_FLOAT_EQ(full_tensor(f.state, f.rig.model, 0, state::LogicalTensor::state, "exp_avg")[0], 0.1f)
      << "with the arguments of the last begin()";
}

TEST_P(EarlyUpdateTest, BeginsNoPartAfterAGradientThatIsNotFinite) {
  f.record();
  f.begin();
  f.reduce(1, false);
  f.reduce(0);
  f.early.finish();
  EXPECT_EQ(f.early.parts_updated(), 0);
}

// For example an all-gather of what a reduce-scatter reduced.
TEST_P(EarlyUpdateTest, WaitsForTheLastCollectiveThatUsesTheGradients) {
  f.begin();
  f.read(0);  // an operand of its own reduction does not count
  f.reduce(0);
  f.reduce(1);
  f.read(0);
  f.read(1);
  f.early.finish();
  f.begin();
  f.reduce(0);
  f.reduce(1);
  f.early.finish();
  EXPECT_EQ(f.early.parts_updated(), 0);
  f.begin();
  f.reduce(0);
  f.reduce(1);
  f.read(1);
  f.read(0);
  f.wait_for_parts(2);
  f.early.finish();
}

TEST_P(EarlyUpdateTest, ReportsAStrategyThatUsesGradientsMoreOftenThanInTheFirstStep) {
  f.record();
  f.begin();
  f.reduce(0);
  f.reduce(1);
  f.reduce(1);
  const std::string failure = failure_of([&] { f.early.finish(); });
  EXPECT_NE(failure.find("strategy 'zero1'"), std::string::npos) << failure;
  EXPECT_NE(failure.find("it used reduced gradients in more collectives than in the first step; set offload.overlap = "
                         "false"),
            std::string::npos)
      << failure;
}

// Parameter "c" begins in the second tile of 1024 elements, so the tiles cut its norm blocks.
TEST(EarlyUpdateTilesTest, WaitForEveryNormBlockThatTheyOverlap) {
  const test::Scratch scratch;
  EarlyUpdateFixture f(in("nvme", scratch.folder().string()), nullptr, {{"a", 1500}, {"c", 3000}});
  f.record();
  f.begin();
  f.reduce(0);
  const update::UpdateSlice& c = f.state.slices()[f.state.slices_of(1)[0]];
  const zr_view later = part_of(c.grad, plan::kNormBlock, 3000 - plan::kNormBlock);
  f.early.gradients_reduced(later.data, later.count, true);
  f.early.finish();
  EXPECT_EQ(f.early.adopt().tiles, (std::vector<char>{1, 0, 0, 1, 1})) << "the first norm block of c is missing";
}

INSTANTIATE_TEST_SUITE_P(Tiers, EarlyUpdateTest, ::testing::Values("cpu", "nvme"),
                         [](const auto& info) { return std::string(info.param); });

TEST(EarlyUpdateObstacleTest, NamesWhatPreventsAnEarlyUpdate) {
  const auto obstacle = [](const std::vector<std::string>& overrides) {
    const OneRankJob rig(overrides);
    return job::early_update_obstacle(rig.context().config(), rig.context().plan);
  };
  const std::vector<std::string> cpu{"offload.optimizer=cpu", "train.nonfinite=stop"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), cpu.begin(), cpu.end());
    return obstacle(more);
  };
  EXPECT_EQ(with({}), "");
  EXPECT_EQ(obstacle({"train.nonfinite=stop"}), "no optimizer state is on a tier");
  EXPECT_EQ(obstacle({"offload.optimizer=cpu"}), "train.nonfinite = \"skip\" may skip it");
  EXPECT_EQ(with({"offload.overlap=false"}), "offload.overlap is false");
  EXPECT_EQ(with({"train.gradient_clipping=1"}), "train.gradient_clipping may clip it");
  EXPECT_EQ(with({"optimizer=lamb"}), "optimizer 'lamb' is not elementwise");
  EXPECT_EQ(with({"gradients.dtype=bf16"}), "gradients.dtype is narrower than the weights");
  const test::Scratch scratch;
  EXPECT_EQ(with({"strategy=zero2", "offload.gradients=nvme", "offload.nvme.path=" + scratch.folder().string()}),
            "reduced gradients or weights are on a disk");
}

TEST(EarlyUpdateObstacleTest, IsNoOptimizerThatOwnsOnlyFrozenParameters) {
  const OneRankJob rig({"offload.optimizer=cpu", "train.nonfinite=stop"});
  plan::MemoryPlan plan = rig.context().plan;
  plan.input.descriptions.resize(1);
  plan.input.descriptions.push_back(plan.input.descriptions[0]);
  plan.input.descriptions[1].sums = {1};
  plan.input.description_of = {0, 1};
  EXPECT_EQ(job::early_update_obstacle(rig.context().config(), plan), "optimizer 'adamw' is not elementwise");
  plan.input.parameters[1].frozen = true;
  EXPECT_EQ(job::early_update_obstacle(rig.context().config(), plan), "");
  plan.input.descriptions[0].ignores_norm = false;
  EXPECT_EQ(job::early_update_obstacle(rig.context().config(), plan), "optimizer 'adamw' may use the gradient norm");
}

}  // namespace
}  // namespace zr::testing
