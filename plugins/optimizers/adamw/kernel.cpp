#include "kernel.hpp"

#include "zr/rounding.hpp"

namespace ZR_ISA {

void adamw(const AdamWConstants& constants, const AdamWRun& run) {
  const AdamWConstants c = constants;
  zr::rounded(run.out_dtype, run.out, run.count, run.streams,
              [&](auto rounding, int64_t first, int64_t n, uint16_t* out) {
                float* __restrict weight = run.weight + first;
                const float* __restrict grad = run.grad + first;
                float* __restrict exp_avg = run.exp_avg + first;
                float* __restrict exp_avg_sq = run.exp_avg_sq + first;
                uint16_t* __restrict to = out;
                const auto update = [&](int64_t i) {
                  float w = weight[i], m = exp_avg[i], v = exp_avg_sq[i];
                  adamw_element(c, grad[i], w, m, v);
                  exp_avg[i] = m;
                  exp_avg_sq[i] = v;
                  weight[i] = w;
                  rounding.store(to, i, w);
                };
                zr::prefetched_loop(n, update, weight, grad, exp_avg, exp_avg_sq);
              });
}

}  // namespace ZR_ISA
