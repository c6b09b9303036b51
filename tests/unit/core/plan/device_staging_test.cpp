// The blocks of gradients through which states on tiers are updated for a device.
#include "plan/device_staging.hpp"

#include <gtest/gtest.h>

#include "base/draft_abi.hpp"
#include "plan/plan.hpp"

namespace {

using namespace zr::host;

constexpr int64_t kBlock = plan::kDeviceBlock;

// A plan whose parameters follow each other in one buffer of weights and one of reduced gradients. States are on the
// tier "cpu", but for a fraction of them.
plan::MemoryPlan plan_of(const std::vector<int64_t>& counts, double device_fraction = 0,
                         uint32_t granularity = ZR_ELEMENTWISE) {
  plan::PlanInput in;
  for (std::size_t i = 0; i < counts.size(); ++i)
    in.parameters.push_back({std::to_string(i), {}, {counts[i]}, counts[i], false, 0});
  in.descriptions[0].slots = {{"m", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}};
  in.descriptions[0].granularity = granularity;
  in.tiers.push_back({"cpu", Tier::host});
  in.tier_request.states = 1;
  in.tier_request.device_fraction = device_fraction;
  return plan::plan_of_rank(in, 0, [](const zr_plan_in& of, const zr_plan_sink& sink) {
    const auto aligned = [&](int64_t count) { return (count + of.align - 1) / of.align * of.align; };
    int64_t elements = 0;
    for (uint32_t p = 0; p < of.n_params; ++p) elements += aligned(of.params[p]->count);
    for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
      const zr_buffer buffer{sizeof(zr_buffer), role, "buffer", elements, ZR_F32, 0};
      sink.buffer(sink.ctx, &buffer);
    }
    for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
      int64_t at = 0;
      for (uint32_t p = 0; p < of.n_params; ++p) {
        const int64_t count = of.params[p]->count;
        const zr_piece piece{sizeof(zr_piece), role, p, role == ZR_ROLE_REDUCED_GRAD ? 1u : 0u, 0, count, at};
        sink.piece(sink.ctx, &piece);
        at += aligned(count);
      }
    }
  });
}

using Ranges = std::vector<std::pair<int64_t, int64_t>>;  // first element and count

Ranges blocks_of(const plan::DeviceStaging& staging) {
  Ranges ranges;
  for (const plan::DeviceStaging::Block& block : staging.blocks) {
    EXPECT_EQ(block.buffer, 1u);
    ranges.emplace_back(block.first, block.count);
  }
  return ranges;
}

TEST(DeviceStagingTest, SmallParametersShareABlockWithThePaddingBetweenThem) {
  const plan::DeviceStaging staging = plan_device_staging(plan_of({1000, 5, 70000}), true);
  EXPECT_EQ(blocks_of(staging), (Ranges{{0, 1024 + 32 + 70000}}));
  EXPECT_EQ(staging.largest, 71056);
  EXPECT_EQ(staging.slot_bytes(), 512 << 10) << "the next power of two after 71056 * 4";
  EXPECT_EQ(staging.bytes(), 2 * (512 << 10)) << "gradients, and a slot of weights";
}

TEST(DeviceStagingTest, WithoutEarlyCopiesTheSlotsHaveTheGradientsToo) {
  const plan::DeviceStaging staging = plan_device_staging(plan_of({kBlock + 1024}), false);
  EXPECT_EQ(staging.largest, kBlock);
  EXPECT_EQ(staging.slot_bytes(), kBlock * 8);
  EXPECT_EQ(staging.bytes(), 2 * kBlock * 8);
  const plan::MemoryPlan large = plan_of({9 * kBlock});
  EXPECT_EQ(plan_device_staging(large, false).bytes(), 3 * kBlock * 8);
  EXPECT_EQ(plan_device_staging(large, true).bytes(), 9 * kBlock * 4 + 3 * kBlock * 4);
}

// The blocks of a rank whose parts are far from each other.
TEST(DeviceStagingTest, BlocksShareAllocationsOfTheLargestSize) {
  const std::vector<int64_t> counts(40, kBlock / 16 + 1024);
  plan::MemoryPlan plan = plan_of(counts);
  std::erase_if(plan.rank_plan.reduced_gradients, [](const plan::Piece& piece) { return piece.param % 2 == 1; });
  plan.rank_plan.state_offset.clear();
  for (int64_t i = 0; i < 20; ++i) plan.rank_plan.state_offset.push_back(i * counts[0]);
  plan.placement.states = {{1, 0, 20 * counts[0]}};
  const plan::DeviceStaging staging = plan_device_staging(plan, true);
  ASSERT_EQ(staging.blocks.size(), 20u);
  EXPECT_EQ(staging.allocations, (std::vector<int64_t>{kBlock * 4, kBlock * 2})) << "15 blocks, and 5";
  EXPECT_EQ(staging.blocks[14].allocation, 0u);
  EXPECT_EQ(staging.blocks[14].offset, 14 * counts[0]);
  EXPECT_EQ(staging.blocks[15].allocation, 1u);
  EXPECT_EQ(staging.blocks[15].offset, 0);
}

TEST(DeviceStagingTest, BlocksAreCutAtNormBlocksOfTheirParameters) {
  // The second parameter begins at element 32, which is not a multiple of 1024.
  EXPECT_EQ(blocks_of(plan_device_staging(plan_of({5, 2 * kBlock + kBlock / 4}), true)),
            (Ranges{{0, kBlock - 992}, {kBlock - 992, kBlock}, {2 * kBlock - 992, kBlock / 4 + 1024}}));
}

TEST(DeviceStagingTest, ParametersThatAreUpdatedCompleteAreNotCut) {
  constexpr int64_t kMost = kBlock / 4 * 3;  // two do not fit
  EXPECT_EQ(blocks_of(plan_device_staging(plan_of({kMost, kMost, 2 * kMost, 5}, 0, ZR_TENSORWISE), true)),
            (Ranges{{0, kMost}, {kMost, kMost}, {2 * kMost, 2 * kMost}, {4 * kMost, 5}}));
}

TEST(DeviceStagingTest, ContainsOnlyGradientsWhoseStatesAreOnATier) {
  EXPECT_EQ(blocks_of(plan_device_staging(plan_of({8192, 8192}, 0.75), true)), (Ranges{{12288, 4096}}));
  EXPECT_TRUE(plan_device_staging(plan_of({8192}, 1), true).blocks.empty());
  EXPECT_EQ(plan_device_staging(plan_of({8192}, 1), true).bytes(), 0);
}

}  // namespace
