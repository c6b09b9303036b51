// Where masters and optimizer states are stored, if parameters have different states and states have blocks.
#include <gtest/gtest.h>

#include "base/draft_abi.hpp"
#include "plan/plan.hpp"

namespace {

using namespace zr::host;

plan::Parameter parameter(const std::string& name, std::vector<int64_t> shape, bool frozen = false) {
  int64_t count = 1;
  for (const int64_t n : shape) count *= n;
  return {name, {}, std::move(shape), count, frozen, 0};
}

plan::OptimizerDescription description(std::vector<zr_slot> slots, uint32_t granularity = ZR_ELEMENTWISE) {
  plan::OptimizerDescription d;
  d.granularity = granularity;
  d.slots = std::move(slots);
  return d;
}

constexpr zr_slot kFull{"full", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0};
constexpr zr_slot kCodes{"codes", ZR_U8, ZR_SLOT_LIKE_PARAM, 0, 0};
constexpr zr_slot kScale{"scale", ZR_F32, ZR_SLOT_PER_BLOCK, 0, 256};
constexpr zr_slot kRows{"rows", ZR_F32, ZR_SLOT_PER_BLOCK, 0, 512};
constexpr zr_slot kColumns{"columns", ZR_F32, ZR_SLOT_PER_COLUMN, 0, 2048};

// "vector" (1000), "matrix" ([10, 512], rows of 512 elements), "codes" (3000) on one rank, with bf16 weights.
class StateArraysTest : public ::testing::Test {
 protected:
  StateArraysTest() {
    in_.parameters = {parameter("vector", {1000}), parameter("matrix", {10, 512}), parameter("codes", {3000})};
    in_.weight_dtype = ZR_BF16;
    in_.descriptions = {description({kFull}), description({kRows, kColumns}), description({kCodes, kScale})};
    in_.description_of = {0, 1, 2};
  }
  plan::MemoryPlan plan() const {
    return make_plan(in_, 0, [](const zr_plan_in& given, const zr_plan_sink& sink) {
      int64_t elements = 0;
      for (uint32_t p = 0; p < given.n_params; ++p) elements += given.params[p]->count + given.align;
      for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
        const zr_buffer buffer{
            sizeof(zr_buffer), role, "buffer", elements, role == ZR_ROLE_WEIGHT ? given.weight_dtype : ZR_F32, 0};
        sink.buffer(sink.ctx, &buffer);
      }
      for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
        int64_t offset = 0;
        for (uint32_t p = 0; p < given.n_params; ++p) {
          const int64_t count = given.params[p]->count;
          const zr_piece piece{sizeof(zr_piece), role, p, role == ZR_ROLE_REDUCED_GRAD, 0, count, offset};
          sink.piece(sink.ctx, &piece);
          offset += (count + given.align - 1) / given.align * given.align;
        }
      }
    });
  }
  plan::PlanInput in_;
};

TEST_F(StateArraysTest, HaveOneArrayPerNameAndDtype) {
  const plan::MemoryPlan p = plan();
  std::vector<std::string> names;
  for (const plan::StateArray& array : p.rank_plan.state_arrays) names.push_back(array.name);
  EXPECT_EQ(names, (std::vector<std::string>{"fp32 master weights", "full", "rows", "columns", "codes", "scale"}));
  EXPECT_EQ(p.array_of(0, 0), 1u);
  EXPECT_EQ(p.array_of(1, 1), 3u);
  EXPECT_EQ(p.array_of(2, 1), 5u);
  in_.descriptions[2].slots = {kFull};
  EXPECT_EQ(plan().rank_plan.state_arrays.size(), 4u) << "'full' of two parameters is one array";
  in_.descriptions[2].slots[0].dtype = ZR_U8;
  EXPECT_EQ(plan().rank_plan.state_arrays.size(), 5u);
}

TEST_F(StateArraysTest, HaveElementsOnlyForParametersWithTheState) {
  const plan::MemoryPlan p = plan();
  const auto elements = [&](std::size_t array) { return p.rank_plan.state_arrays[array].elements; };
  EXPECT_EQ(elements(0), 1024 + 5120 + 3008) << "each parameter starts at a multiple of 32 elements";
  EXPECT_EQ(elements(1), 1024);
  EXPECT_EQ(elements(2), 32) << "10 rows";
  EXPECT_EQ(elements(3), 3 * 512) << "blocks of 4 rows";
  EXPECT_EQ(elements(4), 3008);
  EXPECT_EQ(elements(5), 32) << "12 blocks of 256";
  EXPECT_EQ(p.bytes_by_kind().at(MemoryKind::optimizer), 4 * (1024 + 32 + 1536 + 32) + 3008);
}

TEST_F(StateArraysTest, GiveTheElementsOfAPartOfAParameter) {
  const plan::MemoryPlan p = plan();
  const auto part = [&](std::size_t array, int64_t first, int64_t count) {
    const plan::ArrayRange range = p.array_part(array, p.rank_plan.state_offset[1] + first, count);
    return range;
  };
  EXPECT_EQ(part(2, 0, 5120), (plan::ArrayRange{0, 10}));
  EXPECT_EQ(part(2, 2048, 2048), (plan::ArrayRange{4, 4}));
  EXPECT_EQ(part(3, 2048, 3072), (plan::ArrayRange{512, 1024})) << "the last block has two rows, and a full copy";
  EXPECT_EQ(part(1, 0, 5120).count, 0) << "the matrix has no state 'full'";
}

TEST_F(StateArraysTest, ChecksPerParameterWhereItMayBeCut) {
  EXPECT_EQ(in_.cut_block(0), 1024);
  EXPECT_EQ(in_.cut_block(1), 2048) << "common multiple of norm block, row and block of the columns";
  EXPECT_EQ(in_.cut_block(2), 1024);
  in_.descriptions[1] = description({}, ZR_TENSORWISE);
  EXPECT_EQ(in_.cut_block(1), 5120);
  in_.descriptions[1] = description({}, ZR_ROWWISE);
  EXPECT_EQ(in_.cut_block(1), 1024);
  in_.parameters[1] = parameter("matrix", {100, 36});
  EXPECT_EQ(in_.cut_block(1), 3600) << "36 rows and 1024 have the common multiple 9216, which is more than the tensor";
  in_.parameters[1] = parameter("matrix", {1000, 36});
  EXPECT_EQ(in_.cut_block(1), 9216);
}

TEST_F(StateArraysTest, TellTheStrategyWhereToCut) {
  const plan::PlanInputView view(in_, 0);
  EXPECT_EQ(view.in().params[0]->cut_block, 1024);
  EXPECT_EQ(view.in().params[1]->cut_block, 2048);
  EXPECT_EQ(view.in().params[1]->update_cost, 5120) << "the number of elements";
  in_.descriptions[1].cost = 1e9;
  in_.parameters[0].frozen = true;
  const plan::PlanInputView other(in_, 0);
  EXPECT_EQ(other.in().params[1]->update_cost, 1e9);
  EXPECT_EQ(other.in().params[0]->cut_block, 1024);
  EXPECT_EQ(other.in().params[0]->update_cost, 0);
}

TEST_F(StateArraysTest, TilesOnDiskEndWhereParametersMayBeCut) {
  in_.tiers.push_back({"nvme", Tier::disk, 4096, 1, 512, 0});
  in_.tier_request.states = 1;
  const plan::MemoryPlan p = plan();
  ASSERT_GT(p.placement.tiles.size(), 3u);
  int64_t next = 0;
  for (const plan::StateTile& tile : p.placement.tiles) {
    EXPECT_EQ(tile.first, next);
    next = tile.first + tile.count;
    int64_t bytes = 0;
    for (std::size_t a = 0; a < p.rank_plan.state_arrays.size(); ++a) {
      const plan::StateArray& array = p.rank_plan.state_arrays[a];
      const int64_t size = array.dtype == ZR_U8 ? 1 : 4;
      bytes += (p.array_range(a, tile.first, tile.count).count * size + 511) / 512 * 512;
    }
    EXPECT_EQ(tile.bytes, bytes);
    const int64_t inside = next - p.rank_plan.state_offset[1];
    EXPECT_TRUE(inside <= 0 || inside >= 5120 || inside % 2048 == 0) << "a cut inside the matrix at " << inside;
  }
  EXPECT_EQ(next, p.rank_plan.state_elements);
  int64_t all = 0;
  for (const plan::StateArray& array : p.rank_plan.state_arrays) all += array.elements * (array.dtype == ZR_U8 ? 1 : 4);
  EXPECT_EQ(p.bytes_by_kind(Tier::disk)[MemoryKind::optimizer] + p.bytes_by_kind(Tier::disk)[MemoryKind::master], all);
}

TEST_F(StateArraysTest, CountTheSumsOfARank) {
  EXPECT_EQ(plan().sum_counts().bytes(), 0);
  in_.descriptions[0].sums = {2};
  in_.descriptions[1].sums = {514, 1};
  const plan::MemoryPlan::SumCounts one = plan().sum_counts();
  EXPECT_EQ(one.own, 1 * 2 + 3 * 514) << "blocks times the sums of the largest pass";
  EXPECT_EQ(one.totals, 2 + 515);
  EXPECT_EQ(one.batch, 0) << "one rank exchanges nothing";
}

}  // namespace
