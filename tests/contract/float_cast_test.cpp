// Compares the rounding of zr/float_cast.hpp with its definition: to the nearest value, ties to even.
#include "zr/float_cast.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "zr/c.h"

namespace zr {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double value_of(uint32_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1,
            exponent = static_cast<int>(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const double fraction = std::ldexp(static_cast<double>(bits & ((1u << fraction_bits) - 1)), -fraction_bits);
  const double size = exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  return bits >> (exponent_bits + fraction_bits) ? -size : size;
}

/// Checks that no neighbour of `rounded` is nearer to `exact`, and that a tie went to the even one.
void expect_nearest(float exact, uint32_t rounded, int exponent_bits, int fraction_bits) {
  const uint32_t infinity = ((1u << exponent_bits) - 1) << fraction_bits, sign = 1u << (exponent_bits + fraction_bits);
  const uint32_t size = rounded & (sign - 1);
  ASSERT_EQ(std::signbit(exact), (rounded & sign) != 0);
  ASSERT_LE(size, infinity) << exact;
  const double target = std::fabs(static_cast<double>(exact));
  if (target == kInfinity) {
    EXPECT_EQ(size, infinity);
    return;
  }
  // Beyond the largest value, rounding continues as if the next exponent existed.
  const auto at = [&](uint32_t bits) { return value_of(bits, exponent_bits, fraction_bits); };
  const double gap = std::fabs(at(size) - target);
  if (size < infinity) {
    const double above = at(size + 1) - target;
    EXPECT_TRUE(gap < above || (gap == above && size % 2 == 0)) << exact;
  }
  if (size > 0) {
    const double below = target - at(size - 1);
    EXPECT_TRUE(gap < below || (gap == below && size % 2 == 0)) << exact;
  }
}

/// Representable values, values between them and next to them, over all exponents; and random values.
std::vector<float> samples() {
  std::vector<float> values;
  for (uint32_t high = 0; high < 0x10000u; high += 3) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, 0x1000u, 0x0fffu, 0x1001u}) {
      const float value = float_of(high << 16 | low);
      if (!std::isnan(value)) values.push_back(value);
    }
  }
  uint32_t state = 1;
  for (int i = 0; i < 200000; ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = float_of(state);
    if (!std::isnan(value)) values.push_back(value);
  }
  for (int i = -70000; i <= 70000; i += 7) values.push_back(static_cast<float>(i));
  return values;
}

TEST(FloatCastTest, RoundsToNearestBf16WithTiesToEven) {
  for (const float value : samples()) expect_nearest(value, to_bf16(value), 8, 7);
}

TEST(FloatCastTest, RoundsToNearestFp16WithTiesToEven) {
  for (const float value : samples()) expect_nearest(value, to_f16(value), 5, 10);
}

TEST(FloatCastTest, UpcastsExactlyAndRoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const uint16_t narrow = static_cast<uint16_t>(bits);
    if ((bits & 0x7fffu) <= 0x7f80u) {
      EXPECT_EQ(to_bf16(from_bf16(narrow)), narrow);
    }
    if ((bits & 0x7fffu) <= 0x7c00u) {
      EXPECT_EQ(to_f16(from_f16(narrow)), narrow);
    }
    if ((bits & 0x7fffu) < 0x7c00u) {
      EXPECT_EQ(from_f16(narrow), value_of(bits, 5, 10));
    }
  }
}

TEST(FloatCastTest, KeepsNaN) {
  for (const uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u}) {
    EXPECT_EQ(to_bf16(float_of(bits)), 0x7fc0u);
    EXPECT_EQ(to_f16(float_of(bits)), (bits >> 16 & 0x8000u) | 0x7e00u);
    EXPECT_TRUE(std::isnan(from_f16(0x7e00u)));
  }
}

TEST(FloatCastTest, EqualsTheFunctionsInC) {
  for (const float value : samples()) {
    ASSERT_EQ(zr_to_bf16(value), to_bf16(value)) << value;
    ASSERT_EQ(zr_to_f16(value), to_f16(value)) << value;
  }
  for (const uint32_t bits : {0x7f800000u, 0xff800000u, 0x7f800001u, 0xffffffffu, 0x7fc00000u}) {
    EXPECT_EQ(zr_to_bf16(float_of(bits)), to_bf16(float_of(bits)));
    EXPECT_EQ(zr_to_f16(float_of(bits)), to_f16(float_of(bits)));
  }
}

}  // namespace
}  // namespace zr
