// Norm blocks of one rank: which sums are computed while gradients arrive, and non-finite elements.
// tests/multirank/engine/norm_blocks_test adds up the blocks of several ranks.
#include "engine/norm_blocks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "unit/core/one_rank.hpp"
#include "update/cast.hpp"

namespace zr::testing {
namespace {

using namespace host;

zr_view view_of(const std::vector<float>& values, int64_t first, int64_t count) {
  return {const_cast<float*>(values.data()) + first, count, ZR_F32, 0, {1, 0}};
}

update::UpdateSlice slice_of(uint32_t param, int64_t first, const zr_view& gradient) {
  update::UpdateSlice slice{};
  slice.param = param;
  slice.first = first;
  slice.count = gradient.count;
  slice.grad = gradient;
  return slice;
}

// The reduced gradients of "a" (1500 elements: blocks of 1024 and 476) and "b" (40) in one buffer with 4 elements of
// padding between them.
struct NormBlocksFixture {
  NormBlocksFixture() {
    set_a(2);
    std::fill_n(gradients.begin() + 1504, 40, 3.0f);
  }
  void set_a(float value) { std::fill_n(gradients.begin(), 1500, value); }
  // Elements [first, first + count) of the buffer are final.
  void finalize(int64_t first, int64_t count) {
    blocks.gradients_final(view_of(gradients, first, count), gradients.data() + first);
  }
  double sum_of_squares() {
    EXPECT_EQ(blocks.sum(), 0);
    return blocks.ordered_sum().sum_of_squares;
  }
  OneRankJob rig;
  std::vector<float> gradients = std::vector<float>(1544, 77);
  std::vector<update::UpdateSlice> slices{slice_of(0, 0, view_of(gradients, 0, 1500)),
                                          slice_of(1, 0, view_of(gradients, 1504, 40))};
  engine::NormBlocks blocks{rig.context(), slices};
};

TEST(NormBlocksTest, AddsTheSquaresOfAllElementsButPadding) {
  NormBlocksFixture f;
  EXPECT_TRUE(f.blocks.replicated());
  EXPECT_EQ(f.blocks.own_blocks(), 3);
  EXPECT_EQ(f.sum_of_squares(), 1500 * 4 + 40 * 9);
  EXPECT_EQ(f.blocks.blocks_summed_early(), 0);
}

TEST(NormBlocksTest, AddsOtherValuesThanGradients) {
  NormBlocksFixture f;
  const std::vector<float> states(1544, 0.5f);
  const auto part = [&](uint32_t param, int64_t first, int64_t count) {
    return view_of(states, 1504 * param + first, count);
  };
  EXPECT_EQ(f.blocks.ordered_sum_of(part), 770);
  EXPECT_EQ(f.sum_of_squares(), 1500 * 4 + 40 * 9) << "the sums of a step do not remain";
}

// The gradients change after they were reported as final, which shows when they were added up.
TEST(NormBlocksTest, SumsFinalGradientsEarlyAndOnce) {
  NormBlocksFixture f;
  f.blocks.begin_micro_step(true);
  f.finalize(0, 1500);
  f.set_a(10);
  EXPECT_EQ(f.sum_of_squares(), 1500 * 4 + 40 * 9);
  EXPECT_EQ(f.blocks.blocks_summed_early(), 2);
  EXPECT_EQ(f.sum_of_squares(), 1500 * 100 + 40 * 9) << "the sums of a step do not remain";
  EXPECT_EQ(f.blocks.blocks_summed_early(), 0);
}

TEST(NormBlocksTest, SumsTheBlocksOfSeveralParametersInOneBuffer) {
  NormBlocksFixture f;
  f.blocks.begin_micro_step(true);
  f.finalize(0, 1544);
  std::fill(f.gradients.begin(), f.gradients.end(), 10.0f);
  EXPECT_EQ(f.sum_of_squares(), 1500 * 4 + 40 * 9);
  EXPECT_EQ(f.blocks.blocks_summed_early(), 3);
}

TEST(NormBlocksTest, SumsEarlyOnlyBlocksWhoseElementsAreAllFinal) {
  const struct {
    int64_t first, count;
    double early;  // elements of "a" in complete blocks
    int blocks;
  } cases[] = {{0, 1023, 0, 0},     {0, 1024, 1024, 1}, {0, 1499, 1024, 1}, {0, 1500, 1500, 2}, {1, 1499, 476, 1},
               {1024, 476, 476, 1}, {1024, 475, 0, 0},  {1025, 475, 0, 0},  {1500, 4, 0, 0}};
  for (const auto& [first, count, early, blocks] : cases) {
    NormBlocksFixture f;
    f.blocks.begin_micro_step(true);
    f.finalize(first, count);
    f.set_a(10);
    EXPECT_EQ(f.sum_of_squares(), early * 4 + (1500 - early) * 100 + 40 * 9) << first << " " << count;
    EXPECT_EQ(f.blocks.blocks_summed_early(), blocks) << first << " " << count;
  }
}

TEST(NormBlocksTest, SumsTheRestOfAParameterInALaterCall) {
  NormBlocksFixture f;
  f.blocks.begin_micro_step(true);
  f.finalize(1024, 476);
  f.finalize(0, 1024);
  f.set_a(10);
  EXPECT_EQ(f.sum_of_squares(), 1500 * 4 + 40 * 9);
  EXPECT_EQ(f.blocks.blocks_summed_early(), 2);
}

TEST(NormBlocksTest, SumsNothingEarlyBeforeTheFinalMicroStep) {
  NormBlocksFixture f;
  f.finalize(0, 1500);
  f.set_a(10);
  EXPECT_EQ(f.sum_of_squares(), 1500 * 100 + 40 * 9);
  EXPECT_EQ(f.blocks.blocks_summed_early(), 0);
}

TEST(NormBlocksTest, NewFinalMicroStepDiscardsSumsOfAnAbandonedStep) {
  NormBlocksFixture f;
  f.blocks.begin_micro_step(true);
  f.finalize(0, 1500);
  f.set_a(10);
  f.blocks.begin_micro_step(true);
  EXPECT_EQ(f.sum_of_squares(), 1500 * 100 + 40 * 9);
}

// On a disk-backed buffer the addresses of gradients have no memory; their values are elsewhere.
TEST(NormBlocksTest, ReadsFinalGradientsWhereTheirValuesAre) {
  NormBlocksFixture f;
  const std::vector<float> values(500, 5);
  f.blocks.begin_micro_step(true);
  f.blocks.gradients_final(view_of(f.gradients, 1000, 500), values.data());  // block 1 begins at its 24th element
  EXPECT_EQ(f.sum_of_squares(), 1024 * 4 + 476 * 25 + 40 * 9);
  EXPECT_EQ(f.blocks.blocks_summed_early(), 1);
}

TEST(NormBlocksTest, IgnoresFinalGradientsThatItDoesNotUpdate) {
  NormBlocksFixture f;
  const std::vector<float> other(2048, 5);
  zr_view narrow = view_of(f.gradients, 0, 1500);
  narrow.dtype = ZR_BF16;  // such as the gradient of one backward, before it is added to the sum
  f.blocks.begin_micro_step(true);
  f.blocks.gradients_final(view_of(other, 0, 2048), other.data());
  f.blocks.gradients_final(narrow, f.gradients.data());
  f.blocks.gradients_final(view_of(f.gradients, 0, 0), f.gradients.data());
  EXPECT_EQ(f.sum_of_squares(), 1500 * 4 + 40 * 9);
  EXPECT_EQ(f.blocks.blocks_summed_early(), 0);
}

TEST(NormBlocksTest, CountsNonFiniteElementsAndNamesTheFirstParameter) {
  NormBlocksFixture f;
  f.gradients[1504] = -INFINITY;
  EXPECT_EQ(f.blocks.sum(), 1);
  EXPECT_EQ(f.blocks.ordered_sum().first_non_finite, 1);
  f.gradients[3] = INFINITY;
  f.gradients[4] = NAN;
  f.gradients[1499] = NAN;
  EXPECT_EQ(f.blocks.sum(), 4);
  EXPECT_EQ(f.blocks.ordered_sum().first_non_finite, 0);
  EXPECT_TRUE(std::isnan(f.blocks.ordered_sum().sum_of_squares));
}

TEST(NormBlocksTest, CountsNonFiniteElementsOfSumsComputedEarly) {
  NormBlocksFixture f;
  f.gradients[1030] = INFINITY;
  f.blocks.begin_micro_step(true);
  f.finalize(0, 1544);
  EXPECT_EQ(f.blocks.sum(), 1);
  EXPECT_EQ(f.blocks.blocks_summed_early(), 3);
}

TEST(NormBlocksTest, UpcastsNarrowGradients) {
  const OneRankJob rig;
  const std::vector<float> wide(1540, 1.5f);
  std::vector<uint16_t> narrow(1540);
  update::downcast(wide.data(), 1540, ZR_BF16, narrow.data());
  const zr_view a{narrow.data(), 1500, ZR_BF16, 0, {1, 0}}, b{narrow.data() + 1500, 40, ZR_BF16, 0, {1, 0}};
  const std::vector<update::UpdateSlice> slices{slice_of(0, 0, a), slice_of(1, 0, b)};
  engine::NormBlocks blocks(rig.context(), slices);
  blocks.begin_micro_step(true);
  blocks.gradients_final(a, narrow.data());
  EXPECT_EQ(blocks.sum(), 0);
  EXPECT_EQ(blocks.blocks_summed_early(), 2);
  EXPECT_EQ(blocks.ordered_sum().sum_of_squares, 1540 * 2.25);
}

TEST(NormBlocksTest, JoinsSlicesThatCutAParameterBetweenBlocks) {
  NormBlocksFixture f;
  const std::vector<update::UpdateSlice> cut{slice_of(0, 0, view_of(f.gradients, 0, 1024)),
                                             slice_of(0, 1024, view_of(f.gradients, 1024, 476)),
                                             slice_of(1, 0, view_of(f.gradients, 1504, 40))};
  engine::NormBlocks blocks(f.rig.context(), cut);
  EXPECT_EQ(blocks.own_blocks(), 3);
  blocks.begin_micro_step(true);
  blocks.gradients_final(view_of(f.gradients, 512, 1032), f.gradients.data() + 512);
  EXPECT_EQ(blocks.sum(), 0);
  EXPECT_EQ(blocks.blocks_summed_early(), 2) << "all but the first block";
  EXPECT_EQ(blocks.ordered_sum().sum_of_squares, 1500 * 4 + 40 * 9);
}

TEST(NormBlocksTest, RejectsSlicesThatLackAPlannedElement) {
  NormBlocksFixture f;
  EXPECT_EQ(failure_of([&] {
              const std::vector<update::UpdateSlice> lacking{slice_of(0, 0, view_of(f.gradients, 0, 1024)),
                                                             slice_of(1, 0, view_of(f.gradients, 1504, 40))};
              const engine::NormBlocks blocks(f.rig.context(), lacking);
            }),
            "rank 0 has no reduced gradient for element 1024 of 'a', although its plan assigns that element to it");
}

}  // namespace
}  // namespace zr::testing
