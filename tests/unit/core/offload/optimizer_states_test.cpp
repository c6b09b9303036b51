// OptimizerStates on a disk release all resources, also after a failure.
#include "offload/optimizer_states.hpp"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace zr::test
