#include "kernel.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "zr/rounding.hpp"

namespace ZR_ISA {

namespace {

constexpr int64_t kLanes = 16, kWord = 32;
// One bit each: unlike a shift by the index, a load is vectorized for every instruction set.
constexpr uint32_t kBits[kWord] = {1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
                                   1u << 8,  1u << 9,  1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15,
                                   1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23,
                                   1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31};

// Calls fn(first element, elements) for each word; for full words with a constant number.
template <class F>
ZR_ALWAYS_INLINE void for_each_word(int64_t count, const F& fn) {
  int64_t first = 0;
  for (; first + kWord <= count; first += kWord) fn(first, kWord);
  if (first < count) fn(first, count - first);
}

// The mean of the absolute values, in double: element i in lane i % 16, lanes in ascending order.
ZR_ALWAYS_INLINE float scale_of(const float* values, int64_t count) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<double>(__builtin_fabsf(values[i + lane]));
  for (int64_t lane = 0; i + lane < count; ++lane)
    lanes[lane] += static_cast<double>(__builtin_fabsf(values[i + lane]));
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return static_cast<float>(sum / static_cast<double>(count));
}

// Writes scale and signs of `values` to `words`, and what they leave out to `error`.
ZR_ALWAYS_INLINE void compress(const float* __restrict values, int64_t count, float* __restrict error,
                               uint32_t* __restrict words) {
  const float scale = scale_of(values, count), negative = -scale;
  __builtin_memcpy(words, &scale, sizeof scale);
  for_each_word(count, [&](int64_t first, int64_t n) {
    uint32_t word = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float value = values[first + i];
      word |= value >= 0 ? kBits[i] : 0u;
      error[first + i] = value - (value >= 0 ? scale : negative);
    }
    words[1 + first / kWord] = word;
  });
}

ZR_ALWAYS_INLINE float scale_in(const uint32_t* words) {
  float scale;
  __builtin_memcpy(&scale, words, sizeof scale);
  return scale;
}

// Calls fn(i, value) for each element of a compressed block.
template <class F>
ZR_ALWAYS_INLINE void decompress(const uint32_t* words, int64_t count, const F& fn) {
  const float scale = scale_in(words), negative = -scale;
  for_each_word(count, [&](int64_t first, int64_t n) {
    const uint32_t word = words[1 + first / kWord];
    ZR_INDEPENDENT_ITERATIONS
    for (int64_t i = 0; i < n; ++i) fn(first + i, (word & kBits[i]) != 0 ? scale : negative);
  });
}

// Copies to memory that is not read soon, with stores that do not load its cache lines first.
ZR_ALWAYS_INLINE void copy_past_caches(float* to, const float* from, int64_t count) {
  int64_t i = 0;
#if defined(__SSE2__)
  constexpr int64_t kLine = 16;
  for (; i < count && reinterpret_cast<uintptr_t>(to + i) % (kLine * sizeof(float)) != 0; ++i) to[i] = from[i];
  for (; i + kLine <= count; i += kLine)
    for (int64_t j = i; j < i + kLine; j += 4)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
  _mm_sfence();
#endif
  for (; i < count; ++i) to[i] = from[i];
}

// `value` where x > 0, else +0. A conditional expression would be a branch, which keeps loops from being vectorized.
ZR_ALWAYS_INLINE float where_positive(float x, float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  bits &= x > 0 ? ~0u : 0u;
  __builtin_memcpy(&value, &bits, sizeof bits);
  return value;
}

}  // namespace

void onebit_compress(const onebit::Factors& factors, const float* grad, float* carry, int64_t count, uint32_t* words) {
  const onebit::Factors f = factors;
  float values[onebit::kBlock];
  if (f.begins)
    for (int64_t i = 0; i < count; ++i) carry[i] = carry[i] * f.beta1;
  for (int64_t i = 0; i < count; ++i) values[i] = carry[i] + (grad[i] * f.mul) * f.gain1;
  compress(values, count, carry, words);
}

void onebit_serve(const uint32_t* received, int64_t stride, int32_t world, float* error, int64_t count,
                  uint32_t* words) {
  float values[onebit::kBlock] = {};
  for (int32_t rank = 0; rank < world; ++rank)
    decompress(received + rank * stride, count, [&](int64_t i, float value) { values[i] += value; });
  const float ranks = static_cast<float>(world);
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] / ranks + error[i];
  compress(values, count, error, words);
}

void onebit_decode(const uint32_t* words, float beta1, float* momentum, float* carry, int64_t count) {
  float values[onebit::kBlock];
  float* __restrict m = values;
  float* __restrict c = carry;
  decompress(words, count, [&](int64_t i, float value) {
    m[i] = value;
    c[i] = c[i] + value * beta1;
  });
  copy_past_caches(momentum, values, count);
}

void onebit_update(const AdamWConstants& constants, const AdamWRun& run) {
  const AdamWConstants c = constants;
  if (run.exp_avg) copy_past_caches(run.exp_avg, run.grad, run.count);
  zr::rounded(run.out_dtype, run.out, run.count, run.streams,
              [&](auto rounding, int64_t first, int64_t n, uint16_t* out) {
                float* __restrict weight = run.weight + first;
                const float* __restrict momentum = run.grad + first;
                const float* __restrict exp_avg_sq = run.exp_avg_sq + first;
                uint16_t* __restrict to = out;
                const auto update = [&](int64_t i) {
                  const float v = exp_avg_sq[i];
                  const float change = (momentum[i] * c.rate) / (__builtin_sqrtf(v) + c.eps);
                  const float w = weight[i] * c.decay - where_positive(v, change);
                  weight[i] = w;
                  rounding.store(to, i, w);
                };
                zr::prefetched_loop(n, update, weight, momentum, exp_avg_sq);
              });
}

}  // namespace ZR_ISA
