#include "kernel.hpp"

#include "zr/rounding.hpp"

namespace ZR_ISA {

namespace {

constexpr int64_t kLanes = 16, kWord = 32;

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

ZR_ALWAYS_INLINE float with_sign(float scale, uint32_t word, int64_t bit) {
  return (word >> bit) & 1u ? scale : -scale;
}

// Writes scale and signs of `values` to `words`, and what they leave out to `error`.
ZR_ALWAYS_INLINE void compress(const float* __restrict values, int64_t count, float* __restrict error,
                               uint32_t* __restrict words) {
  const float scale = scale_of(values, count);
  __builtin_memcpy(words, &scale, sizeof scale);
  for (int64_t first = 0, w = 1; first < count; first += kWord, ++w) {
    const int64_t n = count - first < kWord ? count - first : kWord;
    uint32_t word = 0;
    for (int64_t i = 0; i < n; ++i) word |= values[first + i] >= 0 ? 1u << i : 0u;
    words[w] = word;
  }
  for (int64_t i = 0; i < count; ++i) error[i] = values[i] - (values[i] >= 0 ? scale : -scale);
}

ZR_ALWAYS_INLINE float scale_in(const uint32_t* words) {
  float scale;
  __builtin_memcpy(&scale, words, sizeof scale);
  return scale;
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
  for (int32_t rank = 0; rank < world; ++rank) {
    const uint32_t* from = received + rank * stride;
    const float scale = scale_in(from);
    for (int64_t first = 0, w = 1; first < count; first += kWord, ++w) {
      const int64_t n = count - first < kWord ? count - first : kWord;
      const uint32_t word = from[w];
      for (int64_t i = 0; i < n; ++i) values[first + i] += with_sign(scale, word, i);
    }
  }
  const float ranks = static_cast<float>(world);
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] / ranks + error[i];
  compress(values, count, error, words);
}

void onebit_decode(const uint32_t* words, float beta1, float* momentum, float* carry, int64_t count) {
  const float scale = scale_in(words);
  for (int64_t first = 0, w = 1; first < count; first += kWord, ++w) {
    const int64_t n = count - first < kWord ? count - first : kWord;
    const uint32_t word = words[w];
    float* __restrict m = momentum + first;
    float* __restrict c = carry + first;
    for (int64_t i = 0; i < n; ++i) {
      m[i] = with_sign(scale, word, i);
      c[i] = c[i] + m[i] * beta1;
    }
  }
}

void onebit_update(const AdamWConstants& constants, const AdamWRun& run) {
  const AdamWConstants c = constants;
  if (run.exp_avg) __builtin_memcpy(run.exp_avg, run.grad, static_cast<unsigned long>(run.count) * sizeof(float));
  zr::rounded(run.out_dtype, run.out, run.count, run.streams,
              [&](auto rounding, int64_t first, int64_t n, uint16_t* out) {
                float* __restrict weight = run.weight + first;
                const float* __restrict momentum = run.grad + first;
                const float* __restrict exp_avg_sq = run.exp_avg_sq + first;
                uint16_t* __restrict to = out;
                ZR_INDEPENDENT_ITERATIONS
                for (int64_t i = 0; i < n; ++i) {
                  const float v = exp_avg_sq[i];
                  const float change = (momentum[i] * c.rate) / (__builtin_sqrtf(v) + c.eps);
                  const float w = weight[i] * c.decay - (v > 0 ? change : 0.0f);
                  weight[i] = w;
                  rounding.store(to, i, w);
                }
              });
}

}  // namespace ZR_ISA
