#include "kernel.hpp"

#include "codes.hpp"
#include "zr/rounding.hpp"

namespace ZR_ISA {

namespace {
constexpr float kSmallest = 1e-30F;  // blocks of smaller numbers are 0: the inverse of their scale could be infinite

struct Block {
  float exp_avg[kStateBlock], exp_avg_sq[kStateBlock];
};

// 127 codes for either sign, in the bits below that of the sign; 128 is 1.
ZR_ALWAYS_INLINE uint8_t signed_code(float x, float inverse) {
  const float y = x * inverse, a = y < 0 ? -y : y;
  const int code = static_cast<int>(codes::position<1, 0>(a < 1 ? a : 1.0F));
  return static_cast<uint8_t>(y < 0 ? (code < 127 ? code : 127) | 128 : code);
}
// 254 codes; 255 is 1.
ZR_ALWAYS_INLINE uint8_t unsigned_code(float x, float inverse) {
  const float y = x * inverse;
  return static_cast<uint8_t>(static_cast<int>(codes::position<2, 1>(y < 1 ? y : 1.0F)));
}

ZR_ALWAYS_INLINE float inverse_of(float scale) { return scale < kSmallest ? 0.0F : 1 / scale; }

// The largest absolute value. Without the sign, the bits of floats have the order of the numbers; compilers vectorize
// only the comparison of the bits.
ZR_ALWAYS_INLINE float largest_of(const float* values, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t bits;
    __builtin_memcpy(&bits, values + i, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float value;
  __builtin_memcpy(&value, &largest, sizeof value);
  return value;
}

// The numbers of a block's codes.
ZR_ALWAYS_INLINE void load(const uint8_t* __restrict codes, const float* __restrict values, float scale, int64_t n,
                           float* __restrict to) {
  int32_t index[kStateBlock];
  for (int64_t i = 0; i < n; ++i) index[i] = codes[i];
  for (int64_t i = 0; i < n; ++i) to[i] = values[index[i]] * scale;
}

// Writes the codes of a block and its two scales.
ZR_ALWAYS_INLINE void store(const Block& block, int64_t n, const AdamW8Run& run, int64_t first, int64_t index) {
  const float largest = largest_of(block.exp_avg, n), largest_sq = largest_of(block.exp_avg_sq, n);
  run.exp_avg_scale[index] = largest;
  run.exp_avg_sq_scale[index] = largest_sq;
  const float inverse = inverse_of(largest), inverse_sq = inverse_of(largest_sq);
  uint8_t* __restrict exp_avg = run.exp_avg + first;
  uint8_t* __restrict exp_avg_sq = run.exp_avg_sq + first;
  for (int64_t i = 0; i < n; ++i) exp_avg[i] = signed_code(block.exp_avg[i], inverse);
  for (int64_t i = 0; i < n; ++i) exp_avg_sq[i] = unsigned_code(block.exp_avg_sq[i], inverse_sq);
}
}  // namespace

void adamw8(const AdamWConstants& constants, const CodeValues& values, const AdamW8Run& run) {
  const AdamWConstants c = constants;
  Block block;
  for (int64_t first = 0, index = 0; first < run.count; first += kStateBlock, ++index) {
    const int64_t n = first + kStateBlock < run.count ? kStateBlock : run.count - first;
    load(run.exp_avg + first, values.exp_avg, run.exp_avg_scale[index], n, block.exp_avg);
    load(run.exp_avg_sq + first, values.exp_avg_sq, run.exp_avg_sq_scale[index], n, block.exp_avg_sq);
    float* __restrict weight = run.weight + first;
    const float* __restrict grad = run.grad + first;
    float* __restrict exp_avg = block.exp_avg;
    float* __restrict exp_avg_sq = block.exp_avg_sq;
    const auto update = [&](auto rounding, uint16_t* __restrict to) {
      for (int64_t i = 0; i < n; ++i) {
        const float g = grad[i] * c.mul;
        const float m = exp_avg[i] * c.beta1 + g * c.gain1;
        const float v = exp_avg_sq[i] * c.beta2 + (g * c.gain2) * g;
        const float w = weight[i] * c.decay - (m * c.rate) / (__builtin_sqrtf(v) + c.eps);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        weight[i] = w;
        rounding.store(to, i, w);
      }
    };
    if (!run.out) {
      update(zr::KeepFloat{}, nullptr);
    } else if (run.out_dtype == ZR_BF16) {
      update(zr::RoundBf16{}, run.out + first);
    } else {
      update(zr::RoundF16{}, run.out + first);
    }
    store(block, n, run, first, index);
  }
}

}  // namespace ZR_ISA
