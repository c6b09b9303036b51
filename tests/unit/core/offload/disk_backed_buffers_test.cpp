// Reduced gradients on a disk: all resources are released, and no data is read before it is written.
#include "offload/disk_backed_buffers.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "unit/core/offload/disk_rig.hpp"

namespace zr::test {
namespace {

using host::Tier;
using host::comm::CollectiveStaging;

zr_view floats(void* data, int64_t first, int64_t count) {
  return {static_cast<char*>(data) + first * 4, count, ZR_F32, 0, {1, 0}};
}
// A collective that writes elements of the reduced gradients, or accumulates into them.
zr_coll reduce(const zr_view& sums, std::vector<float>& from, bool accumulates = false) {
  zr_coll coll{};
  coll.size = sizeof coll;
  coll.op = ZR_REDUCE_SCATTER;
  coll.reduce = ZR_SUM;
  coll.flags = accumulates ? ZR_COLL_ACCUMULATE : 0;
  from.resize(static_cast<std::size_t>(sums.count));
  coll.src = {from.data(), sums.count, ZR_F32, 0, {1, 0}};
  coll.dst = sums;
  return coll;
}
// A collective that reads them.
zr_coll gather(const zr_view& sums, std::vector<float>& to) {
  zr_coll coll = reduce(sums, to);
  coll.op = ZR_ALL_GATHER;
  std::swap(coll.src, coll.dst);
  return coll;
}
void fill(const zr_view& view, float value) {
  std::fill_n(static_cast<float*>(view.data), static_cast<std::size_t>(view.count), value);
}
bool all_are(const zr_view& view, float value) {
  const auto* values = static_cast<const float*>(view.data);
  return std::all_of(values, values + view.count, [&](float one) { return one == value; });
}

class DiskBackedBuffersTest : public ::testing::Test {
 protected:
  DiskRig rig_;
  const host::plan::MemoryPlan plan_ = rig_.plan({4096, 4096, 500, 600});
  std::vector<float> one_, other_;
};

TEST_F(DiskBackedBuffersTest, ReleasesEverythingWhenTheDiskIsFull) {
  disk.reserves_left = 0;
  EXPECT_THROW(host::offload::DiskBackedBuffers(plan_, rig_.tiers, *rig_.comm, rig_.ledger), Error);
  rig_.expect_nothing_left();
}

TEST_F(DiskBackedBuffersTest, ReleasesEverythingWhenMemoryIsExhausted) {
  const auto make = [&] { host::offload::DiskBackedBuffers(plan_, rig_.tiers, *rig_.comm, rig_.ledger); };
  EXPECT_GE(rig_.fails_for_memory(Tier::host, make), 3) << "resident blocks, chunks, staging memory of collectives";
  EXPECT_EQ(rig_.fails_for_memory(Tier::disk, make), 1);
}

TEST_F(DiskBackedBuffersTest, WaitsForTransfersBeforeFreeingStagingMemory) {
  auto buffers = std::make_unique<host::offload::DiskBackedBuffers>(plan_, rig_.tiers, *rig_.comm, rig_.ledger);
  zr_coll writes = reduce(floats(buffers->base(1), 0, 4096), one_);
  const uint64_t number = buffers->stage(writes);
  disk.busy = true;
  buffers->unstage(number, true);
  EXPECT_FALSE(disk.waiting.empty()) << "a write is in flight";
  std::thread later([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    disk.finish();
  });
  buffers.reset();
  later.join();
  rig_.expect_nothing_left();
}

TEST_F(DiskBackedBuffersTest, ReadsABufferAfterTheCollectiveThatWritesIt) {
  host::offload::DiskBackedBuffers buffers(plan_, rig_.tiers, *rig_.comm, rig_.ledger);
  for (const bool accumulates : {false, true}) {
    zr_coll writes = reduce(floats(buffers.base(1), 0, 4096), one_);
    const uint64_t number = buffers.stage(writes);
    fill(writes.dst, accumulates ? 4.0f : 3.0f);
    const zr_view part = floats(buffers.base(1), 1024, 1024);
    zr_coll reads = accumulates ? reduce(part, other_, true) : gather(part, other_);
    EXPECT_EQ(buffers.stage(reads), CollectiveStaging::kNoCapacity);
    zr_coll unrelated = gather(floats(buffers.base(1), 4096, 1024), other_);
    const uint64_t second = buffers.stage(unrelated);
    EXPECT_NE(second, CollectiveStaging::kNoCapacity) << "a collective that reads other data has staging capacity";
    buffers.unstage(second, true);
    buffers.unstage(number, true);
    const uint64_t third = buffers.stage(reads);
    ASSERT_NE(third, CollectiveStaging::kNoCapacity);
    EXPECT_TRUE(all_are(accumulates ? reads.dst : reads.src, accumulates ? 4.0f : 3.0f));
    buffers.unstage(third, true);
  }
}

// Parameters 2 and 3 share a block, which stays in memory.
TEST_F(DiskBackedBuffersTest, DoesNotWaitForNeighboursInTheSameBlock) {
  host::offload::DiskBackedBuffers buffers(plan_, rig_.tiers, *rig_.comm, rig_.ledger);
  const zr_view first = floats(buffers.base(1), 8192, 500), second = floats(buffers.base(1), 8192 + 512, 600);
  zr_coll before = reduce(second, one_), writes = reduce(first, one_), reads = gather(second, other_);
  const uint64_t a = buffers.stage(before);
  fill(before.dst, 5);
  buffers.unstage(a, true);
  const uint64_t b = buffers.stage(writes);
  fill(writes.dst, 6);
  const uint64_t c = buffers.stage(reads);
  ASSERT_NE(c, CollectiveStaging::kNoCapacity);
  EXPECT_TRUE(all_are(reads.src, 5));
  buffers.unstage(c, true);
  buffers.unstage(b, true);
  zr_coll again = gather(first, other_);
  const uint64_t d = buffers.stage(again);
  ASSERT_NE(d, CollectiveStaging::kNoCapacity);
  EXPECT_TRUE(all_are(again.src, 6));
  buffers.unstage(d, true);
}

}  // namespace
}  // namespace zr::test
