// Compares the sums of squares of the gradient norm with plain loops.
#include "update/norm.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "update/cast.hpp"

namespace {

using namespace zr::host;

std::vector<float> random_values(std::size_t n) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& x : values) x = normal(random);
  return values;
}

zr_view view_of(const std::vector<float>& values) {
  return {const_cast<float*>(values.data()), static_cast<int64_t>(values.size()), ZR_F32, 0, {1, 0}};
}

double plain_block_sum(const std::vector<float>& values, std::size_t from, std::size_t to) {
  double lanes[16] = {}, sum = 0;
  for (std::size_t i = from; i < to; ++i) lanes[(i - from) % 16] += static_cast<double>(values[i]) * values[i];
  for (const double lane : lanes) sum += lane;
  return sum;
}

TEST(NormTest, AddsANormBlockInSixteenLanes) {
  for (const std::size_t n : {1u, 15u, 16u, 17u, 1023u, 1024u, 1025u, 5000u}) {
    const auto values = random_values(n);
    std::vector<double> sums((n + 1023) / 1024);
    update::norm_block_sums(view_of(values), sums.data());
    for (std::size_t block = 0; block < sums.size(); ++block)
      EXPECT_EQ(sums[block], plain_block_sum(values, block * 1024, std::min(n, block * 1024 + 1024)))
          << n << " " << block;
  }
}

TEST(NormTest, IsTheSameOnAnyNumberOfThreads) {
  const auto values = random_values(500001);
  std::vector<double> one((values.size() + 1023) / 1024), four(one.size());
  ThreadPool single(1), several(4);
  update::norm_block_sums(single, {{view_of(values), one.data()}});
  update::norm_block_sums(several, {{view_of(values), four.data()}});
  EXPECT_EQ(one, four);
}

TEST(NormTest, CountsNonFiniteElements) {
  auto values = random_values(3000);
  values[7] = std::numeric_limits<float>::infinity();
  values[2999] = std::nanf("");
  EXPECT_EQ(update::count_non_finite(view_of(values)), 2);
  std::vector<double> sums(3);
  update::norm_block_sums(view_of(values), sums.data());
  EXPECT_FALSE(std::isfinite(sums[0]));
  EXPECT_TRUE(std::isfinite(sums[1]));
  EXPECT_FALSE(std::isfinite(sums[2]));
}

TEST(NormTest, Upcasts16BitElements) {
  for (const zr_dtype dtype : {ZR_BF16, ZR_F16}) {
    std::vector<uint16_t> rounded(5000);
    std::vector<float> wide(5000);
    update::downcast(random_values(5000).data(), 5000, dtype, rounded.data());
    update::upcast(rounded.data(), dtype, 5000, wide.data());
    zr_view view{rounded.data(), 5000, dtype, 0, {1, 0}};
    std::vector<double> sums(5), expected(5);
    update::norm_block_sums(view, sums.data());
    update::norm_block_sums(view_of(wide), expected.data());
    EXPECT_EQ(sums, expected) << dtype;
    rounded[4999] = dtype == ZR_BF16 ? 0x7f80 : 0x7c00;
    EXPECT_EQ(update::count_non_finite(view), 1) << "infinity, dtype " << dtype;
    rounded[1500] = 0xffff;
    EXPECT_EQ(update::count_non_finite(view), 2) << "a NaN, dtype " << dtype;
  }
}

TEST(NormTest, IsFiniteForTheLargestFloats) {
  const std::vector<float> values(1024, std::numeric_limits<float>::max());
  double sum;
  update::norm_block_sums(view_of(values), &sum);
  EXPECT_TRUE(std::isfinite(sum)) << "squares of fp32 do not overflow in double";
}

}  // namespace
