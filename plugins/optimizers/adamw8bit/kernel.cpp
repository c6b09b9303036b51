#include "kernel.hpp"

#include "codes.hpp"
#include "zr/rounding.hpp"

namespace ZR_ISA {

namespace {
struct Block {
  float exp_avg[kStateBlock], exp_avg_sq[kStateBlock];
};

// The largest absolute value.
ZR_ALWAYS_INLINE float largest_of(const float* values, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t bits = codes::bits_of_size(values[i]);
    largest = bits > largest ? bits : largest;
  }
  return zr::float_of(static_cast<uint32_t>(largest));
}

// States of elements that have consecutive codes.
ZR_ALWAYS_INLINE void decode(const uint8_t* exp_avg, const uint8_t* exp_avg_sq, float scale, float scale_sq, int64_t n,
                             float* to, float* to_sq) {
  int64_t i = 0;
#if defined(__AVX2__)
  const __m256 scales = _mm256_set1_ps(scale), scales_sq = _mm256_set1_ps(scale_sq);
  for (; i + codes::kVector <= n; i += codes::kVector) {
    _mm256_storeu_ps(to + i, _mm256_mul_ps(codes::signed_ratios(codes::load(exp_avg + i)), scales));
    _mm256_storeu_ps(to_sq + i, _mm256_mul_ps(codes::unsigned_ratios(codes::load(exp_avg_sq + i)), scales_sq));
  }
#endif
  for (; i < n; ++i) {
    to[i] = codes::signed_ratio(codes::kSigned, exp_avg[i]) * scale;
    to_sq[i] = codes::unsigned_ratio(codes::kUnsigned, exp_avg_sq[i]) * scale_sq;
  }
}

ZR_ALWAYS_INLINE void store(const Block& block, const AdamW8Run& run, int64_t first, int64_t index, int64_t n) {
  const float scale = largest_of(block.exp_avg, n), scale_sq = codes::scale_of_squares(largest_of(block.exp_avg_sq, n));
  run.exp_avg_scale[index] = scale;
  run.exp_avg_sq_scale[index] = scale_sq;
  const float inverse = codes::inverse_of(scale), inverse_sq = codes::inverse_of(scale_sq);
  uint8_t *exp_avg = run.exp_avg + first, *exp_avg_sq = run.exp_avg_sq + first;
  int64_t i = 0;
#if defined(__AVX2__)
  const __m256 inverses = _mm256_set1_ps(inverse), inverses_sq = _mm256_set1_ps(inverse_sq);
  for (; i + codes::kChunk <= n; i += codes::kChunk) {
    codes::store_signed(block.exp_avg + i, inverses, exp_avg + i);
    codes::store_unsigned(block.exp_avg_sq + i, inverses_sq, exp_avg_sq + i);
  }
#endif
  for (; i < n; ++i) {
    exp_avg[i] = codes::signed_code(codes::kSigned, block.exp_avg[i] * inverse);
    exp_avg_sq[i] = codes::unsigned_code(codes::kUnsigned, block.exp_avg_sq[i] * inverse_sq);
  }
}

template <class Rounding>
ZR_ALWAYS_INLINE void update(const AdamWConstants& c, Rounding rounding, float* __restrict weight,
                             const float* __restrict grad, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                             uint16_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float w = weight[i], m = exp_avg[i], v = exp_avg_sq[i];
    adamw_element(c, grad[i], w, m, v);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    weight[i] = w;
    rounding.store(to, i, w);
  }
}

template <class Rounding>
ZR_ALWAYS_INLINE void run_blocks(const AdamWConstants& c, const AdamW8Run& run, Rounding rounding) {
  using codes::kChunk;  // decoded and updated together: the processor decodes the next chunk while it divides for this
                        // one
  Block block;
  for (int64_t first = 0, index = 0; first < run.count; first += kStateBlock, ++index) {
    const int64_t n = first + kStateBlock < run.count ? kStateBlock : run.count - first;
    const float scale = run.exp_avg_scale[index], scale_sq = run.exp_avg_sq_scale[index];
    const auto update_chunk = [&](int64_t begin, int64_t count) __attribute__((always_inline)) {
      const int64_t at = first + begin;
      float *exp_avg = block.exp_avg + begin, *exp_avg_sq = block.exp_avg_sq + begin;
      decode(run.exp_avg + at, run.exp_avg_sq + at, scale, scale_sq, count, exp_avg, exp_avg_sq);
      update(c, rounding, run.weight + at, run.grad + at, exp_avg, exp_avg_sq,
             rounding.downcasts ? run.out + at : nullptr, count);
    };
    int64_t begin = 0;
    for (; begin + kChunk <= n; begin += kChunk) update_chunk(begin, kChunk);
    update_chunk(begin, n - begin);
    store(block, run, first, index, n);
  }
}
}  // namespace

void adamw8(const AdamWConstants& constants, const AdamW8Run& run) {
  const AdamWConstants c = constants;
  if (!run.out) {
    run_blocks(c, run, zr::KeepFloat{});
  } else if (run.out_dtype == ZR_BF16) {
    run_blocks(c, run, zr::RoundBf16{});
  } else {
    run_blocks(c, run, zr::RoundF16{});
  }
}

}  // namespace ZR_ISA
