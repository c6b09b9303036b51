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
                  ZR_INDEPENDENT_ITERATIONS
                  for (int64_t i = 0; i < n; ++i) {
                    float w = weight[i];
                    sgd_element(c, grad[i], w);
                    weight[i] = w;
                    rounding.store(to, i, w);
                  }
                  return;
                }
                float* __restrict buffer = run.buffer + first;
                ZR_INDEPENDENT_ITERATIONS
                for (int64_t i = 0; i < n; ++i) {
                  float w = weight[i], b = buffer[i];
                  sgd_element(c, grad[i], w, b);
                  buffer[i] = b;
                  weight[i] = w;
                  rounding.store(to, i, w);
                }
              });
}

}  // namespace ZR_ISA
