// A rank's training state, on the device and on disk: the same tensors by name.
#include "state/sharded_state.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "unit/core/one_rank.hpp"
#include "update/cast.hpp"

namespace zr::testing {
namespace {

using namespace host;

// The state of a planned job. `disk`: optimizer states are there.
class ShardedStateFixture {
 public:
  explicit ShardedStateFixture(std::vector<std::string> overrides = {}, bool disk = false)
      : rig(with_disk(std::move(overrides), disk, disk_)),
        state(rig.context(), rig.job.host, rig.job.plugins.tiers, nullptr) {}
  std::vector<float> read(uint32_t param, state::LogicalTensor role, const std::string& slot = "") {
    return full_tensor(state, rig.model, param, role, slot);
  }

 private:
  static std::vector<std::string> with_disk(std::vector<std::string> overrides, bool disk, const test::Scratch& at) {
    if (disk) {
      overrides.push_back("offload.optimizer=nvme");
      overrides.push_back("offload.nvme.path=\"" + at.folder().string() + "\"");
    }
    return overrides;
  }
  const test::Scratch disk_;

 public:
  OneRankJob rig;
  state::ShardedState state;
};

std::vector<float> ramp(std::size_t count, float from) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), from);
  return values;
}

class ShardedStateTierTest : public ::testing::TestWithParam<bool> {};

TEST(ShardedStateTest, CopiesModelValuesAndBindsModelToCopies) {
  ShardedStateFixture f;
  EXPECT_EQ(f.read(0, state::LogicalTensor::value), FakeModel::initial(1500));
  EXPECT_EQ(f.read(1, state::LogicalTensor::value), FakeModel::initial(40));
  ASSERT_NE(f.rig.model.values(1), nullptr);
  f.rig.model.values(1)[3] = 77;
  EXPECT_EQ(f.read(1, state::LogicalTensor::value)[3], 77) << "the model's memory is the state's";
}

TEST(ShardedStateTest, ReadsAnyRangeOfATensor) {
  ShardedStateFixture f;
  float out[5];
  f.state.read(0, state::LogicalTensor::value, "", 1022, 5, out);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(out[i], static_cast<float>(1022 + i + 1) * 0.5f);
}

TEST_P(ShardedStateTierTest, WritesAndReadsOptimizerStates) {
  ShardedStateFixture f({}, GetParam());
  EXPECT_EQ(f.read(0, state::LogicalTensor::state, "exp_avg"), std::vector<float>(1500, 0));
  const std::vector<float> values = ramp(1500, 3);
  f.state.write_state(0, "exp_avg", values.data());
  EXPECT_EQ(f.read(0, state::LogicalTensor::state, "exp_avg"), values);
  EXPECT_EQ(f.read(0, state::LogicalTensor::state, "exp_avg_sq"), std::vector<float>(1500, 0));
  EXPECT_EQ(f.read(1, state::LogicalTensor::state, "exp_avg"), std::vector<float>(40, 0));
  f.state.clear_states(0);
  EXPECT_EQ(f.read(0, state::LogicalTensor::state, "exp_avg"), std::vector<float>(1500, 0));
}

TEST(ShardedStateTest, NamesTheStatesThatTheOptimizerHas) {
  ShardedStateFixture f;
  EXPECT_EQ(failure_of([&] { f.read(0, state::LogicalTensor::state, "momentum"); }),
            "optimizer 'adamw' has no state 'momentum'; it has: exp_avg, exp_avg_sq");
}

TEST_P(ShardedStateTierTest, StoresMasterExactlyAndWeightsRounded) {
  ShardedStateFixture f({"train.dtype=bf16"}, GetParam());
  std::vector<float> values(40, 1.0f + 1.0f / 1024);  // between two numbers of bf16
  f.state.store(1, values.data());
  EXPECT_EQ(f.read(1, state::LogicalTensor::value), values) << "the fp32 master";
  std::vector<float> weights(40);
  update::upcast(f.rig.model.memory[1], ZR_BF16, 40, weights.data());
  EXPECT_EQ(weights, std::vector<float>(40, 1.0f));
}

TEST_P(ShardedStateTierTest, MasterChangesOnlyWhereProgramWroteWeights) {
  ShardedStateFixture f({"train.dtype=bf16"}, GetParam());
  const std::vector<float> values(40, 1.0f + 1.0f / 1024);
  f.state.store(1, values.data());
  const auto adopt_all = [&] {
    bool changed = false;
    for (const uint32_t u : f.state.slices_of(1)) changed |= f.state.sync_master_from_weights(f.state.slices()[u]);
    return changed;
  };
  EXPECT_FALSE(adopt_all()) << "every weight is what its master rounds to";
  const float two = 2;
  update::downcast(&two, 1, ZR_BF16, static_cast<uint16_t*>(f.rig.model.memory[1]) + 5);
  EXPECT_TRUE(adopt_all());
  std::vector<float> expected = values;
  expected[5] = 2;
  EXPECT_EQ(f.read(1, state::LogicalTensor::value), expected);
}

TEST(ShardedStateTest, RecordsParametersThatStoreFullChanged) {
  ShardedStateFixture f;
  std::vector<float> values = FakeModel::initial(40);
  f.state.store_full(1, values.data());
  EXPECT_TRUE(f.state.stored().empty()) << "nothing differs";
  values[39] = -1;
  f.state.store_full(1, values.data());
  EXPECT_EQ(f.state.stored(), (std::set<uint32_t>{1}));
  EXPECT_EQ(f.state.take_stored(), (std::set<uint32_t>{1}));
  EXPECT_TRUE(f.state.stored().empty());
  EXPECT_EQ(f.read(1, state::LogicalTensor::value), values);
}

TEST(ShardedStateTest, HashOfWeightsFollowsTheirBytes) {
  ShardedStateFixture f;
  const update::UpdateSlice& slice = f.state.slices()[f.state.slices_of(1).front()];
  const uint64_t before = f.state.hash_of_weights(slice);
  f.rig.model.values(1)[0] += 1;
  EXPECT_NE(f.state.hash_of_weights(slice), before);
  f.rig.model.values(1)[0] -= 1;
  EXPECT_EQ(f.state.hash_of_weights(slice), before);
}

TEST_P(ShardedStateTierTest, VisitsTheMemoryOfATensorByRole) {
  ShardedStateFixture f({}, GetParam());
  const std::vector<float> values = ramp(1500, 0);
  f.state.write_state(0, "exp_avg_sq", values.data());
  std::vector<float> seen(1500, -1);
  f.state.visit_tensor(0, "state.exp_avg_sq", 100, 1300, offload::OptimizerStates::Access::read,
                       [&](const void* memory, int64_t first, int64_t count) {
                         std::memcpy(seen.data() + first, memory, static_cast<std::size_t>(count) * 4);
                       });
  for (std::size_t i = 0; i < seen.size(); ++i)
    EXPECT_EQ(seen[i], i >= 100 && i < 1400 ? static_cast<float>(i) : -1) << i;
  EXPECT_EQ(f.state.contiguous_address(0, "state.exp_avg_sq", 0, 1500) == nullptr, GetParam()) << "on disk it has none";
  EXPECT_EQ(f.state.contiguous_address(0, "weight", 0, 1500), f.rig.model.memory[0]);
}

TEST(ShardedStateTest, UpdateHandsOutEverySliceOnce) {
  ShardedStateFixture f;
  std::vector<std::pair<uint32_t, int64_t>> seen;
  f.state.for_each_slice_in_memory({1, 1}, {}, [&](const std::vector<update::UpdateSlice>& slices) {
    for (const update::UpdateSlice& slice : slices) {
      EXPECT_EQ(slice.slots.size(), 2u);
      seen.emplace_back(slice.param, slice.count);
    }
  });
  EXPECT_EQ(seen, (std::vector<std::pair<uint32_t, int64_t>>{{0, 1500}, {1, 40}}));
}

TEST(ShardedStateTest, DestructionReturnsWeightsToModelAndFreesLedgerBytes) {
  OneRankJob rig({"train.dtype=bf16"});
  const int64_t before = rig.job.ledger.held(Tier::device);
  {
    const state::ShardedState state(rig.context(), rig.job.host, rig.job.plugins.tiers, nullptr);
    EXPECT_GT(rig.job.ledger.held(Tier::device), before);
    EXPECT_EQ(rig.model.released, 0);
  }
  EXPECT_EQ(rig.model.released, 1);
  EXPECT_EQ(rig.job.ledger.held(Tier::device), before);
}

INSTANTIATE_TEST_SUITE_P(Tiers, ShardedStateTierTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Disk" : "Device"; });

}  // namespace
}  // namespace zr::testing
