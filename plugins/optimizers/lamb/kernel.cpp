#include "kernel.hpp"

#include "zr/rounding.hpp"

namespace ZR_ISA {

namespace {
constexpr int kLanes = 16;  // of a sum: element i of a block is in lane i % 16

ZR_ALWAYS_INLINE float direction(const LambConstants& c, float m, float v, float w) {
  return (m * c.unbias1) / (__builtin_sqrtf(v) * c.unbias2 + c.eps) + c.weight_decay * w;
}

// The sum of the lanes, in ascending order.
ZR_ALWAYS_INLINE double sum_of(const double* lanes) {
  double sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}
}  // namespace

void lamb_moments(const LambConstants& constants, const AdamWRun& run, int64_t block, double* sums) {
  const LambConstants c = constants;
  for (int64_t first = 0; first < run.count; first += block, sums += 2) {
    const int64_t n = first + block < run.count ? block : run.count - first;
    const float* __restrict weight = run.weight + first;
    const float* __restrict grad = run.grad + first;
    float* __restrict exp_avg = run.exp_avg + first;
    float* __restrict exp_avg_sq = run.exp_avg_sq + first;
    double weights[kLanes] = {}, directions[kLanes] = {};
    const auto element = [&](int64_t i, int lane) {
      const float g = grad[i] * c.mul;
      const float m = exp_avg[i] * c.beta1 + g * c.gain1;
      const float v = exp_avg_sq[i] * c.beta2 + (g * c.gain2) * g;
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      const double w = weight[i], u = direction(c, m, v, weight[i]);
      weights[lane] += w * w;
      directions[lane] += u * u;
    };
    int64_t line = 0;
    for (; line + kLanes <= n; line += kLanes) {
      ZR_INDEPENDENT_ITERATIONS
      for (int lane = 0; lane < kLanes; ++lane) element(line + lane, lane);
    }
    for (int lane = 0; line + lane < n; ++lane) element(line + lane, lane);
    sums[0] = sum_of(weights);
    sums[1] = sum_of(directions);
  }
}

void lamb_update(const LambConstants& constants, const AdamWRun& run) {
  const LambConstants c = constants;
  zr::rounded(run.out_dtype, run.out, run.count, run.streams,
              [&](auto rounding, int64_t first, int64_t n, uint16_t* out) {
                float* __restrict weight = run.weight + first;
                const float* __restrict exp_avg = run.exp_avg + first;
                const float* __restrict exp_avg_sq = run.exp_avg_sq + first;
                uint16_t* __restrict to = out;
                const auto update = [&](int64_t i) {
                  const float w = weight[i] - c.rate * direction(c, exp_avg[i], exp_avg_sq[i], weight[i]);
                  weight[i] = w;
                  rounding.store(to, i, w);
                };
                zr::prefetched_loop(n, update, weight, exp_avg, exp_avg_sq);
              });
}

}  // namespace ZR_ISA
