// Norm blocks: their sum is bit-identical on every rank, independent of which ranks hold the blocks and of how many are
// exchanged at a time.
#include "engine/norm_blocks.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "support/comm_rig.hpp"
#include "support/forked_ranks.hpp"

namespace zr::testing {
namespace {

using namespace host;

const std::vector<int64_t> kCounts{1, 5000, 1024, 100, 40000, 3072};

// Assigns runs of norm blocks to the ranks at random; parameter 3 is frozen. `replicated`: every rank has all blocks.
plan::StrategyPlan round_robin(bool replicated) {
  return [replicated](const zr_plan_in& in, const zr_plan_sink& sink) {
    int64_t elements = 0;
    for (const int64_t count : kCounts) elements += (count + in.align - 1) / in.align * in.align;
    for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
      const zr_buffer buffer{sizeof(zr_buffer), role, role == ZR_ROLE_WEIGHT ? "weights" : "sums", elements, ZR_F32, 0};
      sink.buffer(sink.ctx, &buffer);
    }
    std::mt19937 random(11);  // the same assignment on every rank
    for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
      int64_t offset = 0;
      for (uint32_t p = 0; p < in.n_params; ++p) {
        const int64_t count = in.params[p]->count;
        for (int64_t first = 0; first < count;) {
          const bool full = role == ZR_ROLE_WEIGHT || replicated;
          const int64_t n = full ? count : std::min<int64_t>(count - first, (1 + random() % 7) * in.norm_block);
          const bool mine = full || static_cast<int32_t>(random() % static_cast<uint32_t>(in.world)) == in.rank;
          const zr_piece piece{sizeof(zr_piece), role, p, role == ZR_ROLE_WEIGHT ? 0u : 1u, first, n, offset + first};
          if (mine && !(role == ZR_ROLE_REDUCED_GRAD && (in.params[p]->flags & ZR_PARAM_FROZEN)))
            sink.piece(sink.ctx, &piece);
          first += n;
        }
        offset += (count + in.align - 1) / in.align * in.align;
      }
    }
  };
}

plan::PlanInput input(int world) {
  plan::PlanInput in;
  in.world = world;
  for (std::size_t i = 0; i < kCounts.size(); ++i)
    in.parameters.push_back({"p" + std::to_string(i), {}, {kCounts[i]}, kCounts[i], i == 3, 0});
  return in;
}

// Element i of a parameter, the same on every rank.
float value(uint32_t param, int64_t i) { return std::sin(static_cast<float>(param * 100000 + i)) * 3; }

double expected() {
  double sum = 0;
  for (uint32_t p = 0; p < kCounts.size(); ++p)
    for (int64_t block = 0; p != 3 && block < kCounts[p]; block += plan::kNormBlock) {
      double lanes[16] = {}, all = 0;
      for (int64_t i = block; i < std::min(block + plan::kNormBlock, kCounts[p]); ++i) {
        const double x = value(p, i);
        lanes[(i - block) % 16] += x * x;
      }
      for (const double lane : lanes) all += lane;
      sum += all;
    }
  return sum;
}

class NormBlocksTest : public ::testing::TestWithParam<int> {};

TEST_P(NormBlocksTest, SumsToTheSameBitsForEveryWindowSize) {
  const SharedJob job;
  expect_success(run_ranks(GetParam(), [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world));
    auto comm = rig.open();
    ThreadPool pool(1);
    for (const bool replicated : {false, true})
      for (const int64_t window : {1, 2, 7, 1000}) {
        const plan::MemoryPlan plan = make_plan(input(GetParam()), rank.rank, round_robin(replicated));
        std::vector<std::vector<float>> sums;
        std::vector<update::UpdateSlice> slices;
        for (const plan::Piece& piece : plan.rank_plan.reduced_gradients) {
          sums.emplace_back();
          for (int64_t i = 0; i < piece.count; ++i) sums.back().push_back(value(piece.param, piece.first + i));
          slices.push_back({piece.param,
                            piece.first,
                            piece.count,
                            {},
                            {},
                            {sums.back().data(), piece.count, ZR_F32, 0, {1, 0}},
                            {}});
        }
        const int64_t before = rig.ledger().held(Tier::device, MemoryKind::other);
        {
          engine::NormBlocks blocks({*comm, pool, plan, rig.ledger()}, slices, nullptr, window);
          for (int twice = 0; twice < 2; ++twice) {
            EXPECT_EQ(blocks.sum(), 0);
            const engine::NormBlocks::Norm norm = blocks.ordered_sum();
            EXPECT_EQ(norm.sum_of_squares, expected()) << "window " << window << (replicated ? ", replicated" : "");
            EXPECT_EQ(norm.first_non_finite, -1);
          }
          // Puts one infinity into parameter 4 and one into parameter 2, on the ranks that hold these elements.
          for (std::size_t u = 0; u < slices.size(); ++u)
            for (const auto& [param, element] : {std::pair{4u, int64_t{30000}}, {2u, int64_t{3}}})
              if (slices[u].param == param && slices[u].first <= element && element < slices[u].first + slices[u].count)
                sums[u][static_cast<std::size_t>(element - slices[u].first)] = INFINITY;
          blocks.sum();
          EXPECT_EQ(blocks.ordered_sum().first_non_finite, 2) << "the first one in the model's order";
          if (window == 1000) {
            EXPECT_EQ(rig.ledger().held(Tier::device, MemoryKind::other) - before, plan.norm_blocks.bytes(rank.rank))
                << "as planned";
          }
        }
        EXPECT_EQ(rig.ledger().held(Tier::device, MemoryKind::other), before) << "all memory is freed";
      }
  }));
}
INSTANTIATE_TEST_SUITE_P(Ranks, NormBlocksTest, ::testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace zr::testing
