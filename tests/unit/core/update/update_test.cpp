// Compares norm and rounding with plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "update/cast.hpp"
#include "update/norm.hpp"

namespace {

using namespace zr::host;

std::vector<float> noise(std::size_t n) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& x : values) x = normal(random);
  return values;
}

zr_view view_of(const std::vector<float>& values) {
  return {const_cast<float*>(values.data()), static_cast<int64_t>(values.size()), ZR_F32, 0, {1, 0}};
}

double plain_leaf(const std::vector<float>& values, std::size_t from, std::size_t to) {
  double lanes[16] = {}, sum = 0;
  for (std::size_t i = from; i < to; ++i) lanes[(i - from) % 16] += static_cast<double>(values[i]) * values[i];
  for (const double lane : lanes) sum += lane;
  return sum;
}

TEST(NormTest, AddsANormBlockInSixteenLanes) {
  for (const std::size_t n : {1u, 15u, 16u, 17u, 1023u, 1024u, 1025u, 5000u}) {
    const auto values = noise(n);
    std::vector<double> leaves((n + 1023) / 1024);
    update::norm_block_sums(view_of(values), leaves.data());
    for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf)
      EXPECT_EQ(leaves[leaf], plain_leaf(values, leaf * 1024, std::min(n, leaf * 1024 + 1024))) << n << " " << leaf;
  }
}

TEST(NormTest, IsTheSameOnAnyNumberOfThreads) {
  const auto values = noise(500001);
  std::vector<double> one((values.size() + 1023) / 1024), four(one.size());
  ThreadPool single(1), several(4);
  update::norm_block_sums(single, {{view_of(values), one.data()}});
  update::norm_block_sums(several, {{view_of(values), four.data()}});
  EXPECT_EQ(one, four);
}

TEST(NormTest, CountsNonFiniteElements) {
  auto values = noise(3000);
  values[7] = std::numeric_limits<float>::infinity();
  values[2999] = std::nanf("");
  EXPECT_EQ(update::count_non_finite(view_of(values)), 2);
  std::vector<double> leaves(3);
  update::norm_block_sums(view_of(values), leaves.data());
  EXPECT_FALSE(std::isfinite(leaves[0]));
  EXPECT_TRUE(std::isfinite(leaves[1]));
  EXPECT_FALSE(std::isfinite(leaves[2]));
}

TEST(NormTest, Upcasts16BitElements) {
  for (const zr_dtype dtype : {ZR_BF16, ZR_F16}) {
    std::vector<uint16_t> narrow_values(5000);
    std::vector<float> wide(5000);
    update::downcast(noise(5000).data(), 5000, dtype, narrow_values.data());
    update::upcast(narrow_values.data(), dtype, 5000, wide.data());
    zr_view view{narrow_values.data(), 5000, dtype, 0, {1, 0}};
    std::vector<double> leaves(5), expected(5);
    update::norm_block_sums(view, leaves.data());
    update::norm_block_sums(view_of(wide), expected.data());
    EXPECT_EQ(leaves, expected) << dtype;
    narrow_values[4999] = dtype == ZR_BF16 ? 0x7f80 : 0x7c00;
    EXPECT_EQ(update::count_non_finite(view), 1) << "infinity, dtype " << dtype;
    narrow_values[1500] = 0xffff;
    EXPECT_EQ(update::count_non_finite(view), 2) << "a NaN, dtype " << dtype;
  }
}

TEST(NormTest, IsFiniteForTheLargestFloats) {
  const std::vector<float> values(1024, std::numeric_limits<float>::max());
  double leaf;
  update::norm_block_sums(view_of(values), &leaf);
  EXPECT_TRUE(std::isfinite(leaf)) << "squares of fp32 do not overflow in double";
}

TEST(RoundingTest, RoundsToNearestEvenBf16) {
  const auto rounded = [](uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    uint16_t out;
    update::downcast(&value, 1, ZR_BF16, &out);
    return out;
  };
  EXPECT_EQ(rounded(0x3f808000), 0x3f80) << "half way, down to even";
  EXPECT_EQ(rounded(0x3f818000), 0x3f82) << "half way, up to even";
  EXPECT_EQ(rounded(0x3f808001), 0x3f81) << "above half";
  EXPECT_EQ(rounded(0x7f7fffff), 0x7f80) << "the largest fp32 overflows to infinity";
  EXPECT_EQ(rounded(0x80000000), 0x8000) << "minus zero keeps its sign";
  EXPECT_EQ(rounded(0x7f800001) & 0x7fc0, 0x7fc0) << "a NaN stays one";
}

TEST(RoundingTest, RoundsToNearestEvenFp16AndOverflowsToInfinity) {
  const auto rounded = [](float value) {
    uint16_t out;
    update::downcast(&value, 1, ZR_F16, &out);
    return out;
  };
  EXPECT_EQ(rounded(1 + 0x1p-11f), 0x3c00) << "half way, down to even";
  EXPECT_EQ(rounded(1 + 3 * 0x1p-11f), 0x3c02) << "half way, up to even";
  EXPECT_EQ(rounded(65519.99f), 0x7bff) << "the largest finite value";
  EXPECT_EQ(rounded(65520), 0x7c00) << "half way to the next exponent, up to infinity";
  EXPECT_EQ(rounded(0x1p-25f), 0) << "half the smallest, down to even";
  EXPECT_EQ(rounded(-0x1.8p-24f), 0x8002) << "subnormal, half way, up to even";
}

TEST(RoundingTest, RoundTrips16BitValuesExactly) {
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16}) {
    const auto values = noise(1000);
    std::vector<char> narrowed(4000), again(4000);
    std::vector<float> wide(1000);
    update::downcast(values.data(), 1000, dtype, narrowed.data());
    update::upcast(narrowed.data(), dtype, 1000, wide.data());
    update::downcast(wide.data(), 1000, dtype, again.data());
    EXPECT_EQ(narrowed, again);
  }
}

}  // namespace
