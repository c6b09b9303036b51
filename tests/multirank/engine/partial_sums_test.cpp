// Sums over parameters: bit-identical on every rank, independent of which ranks hold the blocks and of how many are
// exchanged at a time.
#include "engine/partial_sums.hpp"

#include <gtest/gtest.h>

#include <map>

#include "multirank/engine/block_plan.hpp"
#include "support/comm_rig.hpp"
#include "support/forked_ranks.hpp"

namespace zr::testing {
namespace {

// The sums of a block in a pass: any function of its place.
double sum_of(uint32_t pass, uint32_t param, int64_t first, int64_t s) {
  return 1.0 / (3 + pass) + value(param, first) * 1e-3 + std::sin(static_cast<double>(s * 7 + first));
}

// All parameters but the last have two passes, of 3 sums and of 1; the last has none.
plan::PlanInput input_with_passes(int world) {
  plan::PlanInput in = input(world);
  in.descriptions.resize(2);
  in.descriptions[0].sums = {3, 1};
  in.description_of.assign(kCounts.size(), 0);
  in.description_of.back() = 1;
  return in;
}

class PartialSumsTest : public ::testing::TestWithParam<int> {};

TEST_P(PartialSumsTest, AddsBlocksInTheirOrderForEveryBatchSize) {
  const SharedJob job;
  expect_success(run_ranks(GetParam(), [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world));
    auto comm = rig.open();
    ThreadPool pool(1);
    for (const bool replicated : {false, true})
      for (const int64_t batch : {1, 10, 100, 100000}) {
        const plan::MemoryPlan plan = make_plan(input_with_passes(GetParam()), rank.rank, round_robin(replicated));
        const int64_t before = rig.ledger().held(Tier::device, MemoryKind::other);
        const job::RankContext context{*comm, pool, plan, rig.ledger()};
        {
          engine::PartialSums sums(context, batch);
          ASSERT_EQ(sums.passes(), 2u);
          if (batch == 100000) {
            EXPECT_EQ(rig.ledger().held(Tier::device, MemoryKind::other) - before, plan.sum_counts().bytes());
          }
          std::vector<char> touched(kCounts.size(), 1);
          touched[1] = 0;
          touched.back() = 0;  // it has no passes
          for (int twice = 0; twice < 2; ++twice) {
            for (uint32_t pass = 0; pass < 2; ++pass) {
              const int64_t width = pass == 0 ? 3 : 1;
              sums.begin(pass);
              for (const plan::Piece& piece : plan.rank_plan.reduced_gradients) {
                if (!touched[piece.param]) continue;
                for (int64_t first = piece.first; first < piece.first + piece.count; first += plan::kNormBlock)
                  for (int64_t s = 0; s < width; ++s)
                    sums.partial(piece.param, first)[s] += sum_of(pass, piece.param, first, s);
              }
              sums.end(touched);
            }
            std::map<uint32_t, bool> own;
            for (const plan::Piece& piece : plan.rank_plan.reduced_gradients) own[piece.param] = true;
            for (const auto& [param, mine] : own) {
              if (!touched[param]) continue;
              for (int64_t s = 0; s < 4; ++s) {
                double expected = 0;
                for (int64_t first = 0; first < kCounts[param]; first += plan::kNormBlock)
                  expected += sum_of(s < 3 ? 0 : 1, param, first, s < 3 ? s : 0);
                EXPECT_EQ(sums.totals(param)[s], expected) << "parameter " << param << ", sum " << s;
              }
            }
          }
        }
        EXPECT_EQ(rig.ledger().held(Tier::device, MemoryKind::other), before) << "all memory is freed";
      }
  }));
}

TEST_P(PartialSumsTest, TakesNoMemoryIfNoOptimizerHasPasses) {
  const SharedJob job;
  expect_success(run_ranks(GetParam(), [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world));
    auto comm = rig.open();
    ThreadPool pool(1);
    const plan::MemoryPlan plan = make_plan(input(GetParam()), rank.rank, round_robin(false));
    const int64_t before = rig.ledger().held(Tier::device, MemoryKind::other);
    const job::RankContext context{*comm, pool, plan, rig.ledger()};
    const engine::PartialSums sums(context);
    EXPECT_EQ(sums.passes(), 0u);
    EXPECT_EQ(rig.ledger().held(Tier::device, MemoryKind::other), before);
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, PartialSumsTest, ::testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace zr::testing
