// Compares the rounding of elements with its definition.
#include "update/cast.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace {

using namespace zr::host;

std::vector<float> noise(std::size_t n) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& x : values) x = normal(random);
  return values;
}

TEST(CastTest, RoundsToNearestEvenBf16) {
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

TEST(CastTest, RoundsToNearestEvenFp16AndOverflowsToInfinity) {
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

TEST(CastTest, RoundTrips16BitValuesExactly) {
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16}) {
    const auto values = noise(1000);
    std::vector<char> downcasted(4000), again(4000);
    std::vector<float> wide(1000);
    update::downcast(values.data(), 1000, dtype, downcasted.data());
    update::upcast(downcasted.data(), dtype, 1000, wide.data());
    update::downcast(wide.data(), 1000, dtype, again.data());
    EXPECT_EQ(downcasted, again);
  }
}

}  // namespace
