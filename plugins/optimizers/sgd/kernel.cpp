#include "kernel.hpp"

#include "zr/rounding.hpp"

namespace ZR_ISA {

void sgd(const SgdConstants& constants, const SgdRun& run) {
  const SgdConstants c = constants;
  zr::rounded(run.out_dtype, run.out, run.count, run.streams,
              [&](auto rounding, int64_t first, int64_t n, uint16_t* out) {
                float* __restrict weight = run.weight + first;
                const float* __restrict grad = run.grad + first;
                uint16_t* __restrict to = out;
                if (!run.buffer) {
                  const auto update = [&](int64_t i) {
                    float w = weight[i];
                    sgd_element(c, grad[i], w);
                    weight[i] = w;
                    rounding.store(to, i, w);
                  };
                  return zr::prefetched_loop(n, update, weight, grad);
                }
                float* __restrict buffer = run.buffer + first;
                const auto update = [&](int64_t i) {
                  float w = weight[i], b = buffer[i];
                  sgd_element(c, grad[i], w, b);
                  buffer[i] = b;
                  weight[i] = w;
                  rounding.store(to, i, w);
                };
                zr::prefetched_loop(n, update, weight, grad, buffer);
              });
}

}  // namespace ZR_ISA
