// OptimizerStates on a disk release all resources, also after a failure, and writes of tiles that were updated early
// are not waited for.
#include "offload/optimizer_states.hpp"

#include <gtest/gtest.h>

#include "offload/early_tiles.hpp"
#include "unit/core/offload/disk_rig.hpp"

namespace zr::test {
namespace {

using host::Tier;
using host::offload::OptimizerStates;

TEST(OptimizerStatesTest, ResidesOnThePlannedTiersAndReleasesEverything) {
  DiskRig rig;
  const host::plan::MemoryPlan plan = rig.plan({5000, 3000});
  {
    const OptimizerStates states(plan, rig.tiers, rig.ledger);
    EXPECT_EQ(disk.slots.size(), 1u);
    EXPECT_EQ(disk.announced.size(), 1u);
    EXPECT_GT(rig.ledger.held(Tier::device), 0);
    EXPECT_GT(rig.ledger.held(Tier::disk), rig.ledger.held(Tier::device)) << "two fifths stay on the device";
  }
  rig.expect_nothing_left();
}

TEST(OptimizerStatesTest, ReleasesEverythingWhenTheDiskIsFull) {
  DiskRig rig;
  const host::plan::MemoryPlan plan = rig.plan({5000, 3000});
  disk.reserves_left = 0;
  try {
    const OptimizerStates states(plan, rig.tiers, rig.ledger);
    FAIL() << "the disk is full";
  } catch (const Error& failure) {
    EXPECT_STREQ(failure.what(), "offload 'disk' (disk): reserve: the disk is full");
  }
  rig.expect_nothing_left();
}

TEST(OptimizerStatesTest, ReleasesEverythingWhenMemoryIsExhausted) {
  DiskRig rig;
  const host::plan::MemoryPlan plan = rig.plan({5000, 3000});
  const auto make = [&] { const OptimizerStates states(plan, rig.tiers, rig.ledger); };
  EXPECT_EQ(rig.fails_for_memory(Tier::device, make), 2) << "one array per state";
  EXPECT_EQ(rig.fails_for_memory(Tier::host, make), 1) << "states in flight";
  EXPECT_EQ(rig.fails_for_memory(Tier::disk, make), 2) << "arrays in one allocation";
}

// The slices of all parameters; weights and gradients are in `memory`.
std::vector<host::update::UpdateSlice> slices_of(const host::plan::MemoryPlan& plan, std::vector<float>& memory) {
  std::vector<host::update::UpdateSlice> slices;
  for (std::size_t i = 0; i < plan.rank_plan.reduced_gradients.size(); ++i) {
    const host::plan::Piece& piece = plan.rank_plan.reduced_gradients[i];
    const zr_view values{memory.data(), piece.count, ZR_F32, 0, {1, 0}};
    host::update::UpdateSlice slice{piece.param, 0, piece.count, values, {}, values, {{}, {}}};
    slice.state_offset = plan.rank_plan.state_offset[i];
    slices.push_back(std::move(slice));
  }
  return slices;
}

// If for_each_slice_in_memory() waited for writes, it would not return while the disk is busy: so the first pass, on a
// disk that is not, counts its waits.
TEST(OptimizerStatesTest, AnUpdateWithoutTilesDoesNotWaitForTheWritesOfEarlyOnes) {
  DiskRig rig;
  const host::plan::MemoryPlan plan = rig.plan({4000, 2000});
  const std::size_t tiles = plan.placement.tiles.size();
  ASSERT_GT(tiles, 1u);
  ASSERT_LE(tiles, static_cast<std::size_t>(host::plan::kTilesInFlight)) << "all can be written at once";
  std::vector<float> memory(4000);
  const std::vector<host::update::UpdateSlice> slices = slices_of(plan, memory);
  const auto fill = [](const std::vector<host::update::UpdateSlice>& parts) {
    for (const host::update::UpdateSlice& part : parts)
      std::fill_n(static_cast<float*>(part.slots[1].data), part.slots[1].count, 5.0f);
  };
  for (const bool busy : {false, true}) {
    OptimizerStates states(plan, rig.tiers, rig.ledger);
    host::offload::EarlyTiles early(states, slices);
    int waits = 0;
    states.on_wait([&](const char*, auto) { ++waits; });
    disk.busy = busy;
    early.begin();
    for (std::size_t tile = 0; tile < tiles; ++tile) early.update(tile, fill);
    early.end();
    states.for_each_slice_in_memory(slices, {1, 1}, std::vector<char>(tiles, 1),
                                    [](const auto&) { FAIL() << "a tile is left"; });
    ASSERT_EQ(waits, 0);
    EXPECT_EQ(disk.waiting.size(), busy ? tiles : 0);
    disk.finish();
    const host::plan::StateTile& first = plan.placement.tiles.front();
    states.visit(1, first.first, first.count, OptimizerStates::Access::read, "v",
                 [](const void* values, int64_t, int64_t count) {
                   for (int64_t i = 0; i < count; ++i) ASSERT_EQ(static_cast<const float*>(values)[i], 5.0f) << i;
                 });
  }
  rig.expect_nothing_left();
}

}  // namespace
}  // namespace zr::test
