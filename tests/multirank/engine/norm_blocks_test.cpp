// Norm blocks: their sum is bit-identical on every rank, independent of which ranks hold the blocks and of how many are
// exchanged at a time.
#include "engine/norm_blocks.hpp"

#include <gtest/gtest.h>

#include "multirank/engine/block_plan.hpp"
#include "support/comm_rig.hpp"
#include "support/forked_ranks.hpp"

namespace zr::testing {
namespace {

// squares: of the squares of all values; otherwise, of the values.
double expected(bool squares) {
  double sum = 0;
  for (uint32_t p = 0; p < kCounts.size(); ++p)
    for (int64_t block = 0; p != 3 && block < kCounts[p]; block += plan::kNormBlock) {
      double lanes[16] = {}, all = 0;
      for (int64_t i = block; i < std::min(block + plan::kNormBlock, kCounts[p]); ++i) {
        const double x = value(p, i);
        lanes[(i - block) % 16] += squares ? x * x : x;
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
            EXPECT_EQ(norm.sum_of_squares, expected(true)) << "window " << window << (replicated ? ", replicated" : "");
            EXPECT_EQ(norm.first_non_finite, -1);
            const auto values = [&](uint32_t param, int64_t first, int64_t count) {
              for (const update::UpdateSlice& slice : slices)
                if (slice.param == param && slice.first <= first && first < slice.first + slice.count)
                  return part_of(slice.grad, first - slice.first, count);
              return zr_view{};
            };
            EXPECT_EQ(blocks.ordered_sum_of(values), expected(false)) << "window " << window;
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
