// The arithmetic of AdamW for one element, for the loops on the CPU and on devices. docs/numerics.md, section
// 9, has the order of operations; no product is contracted with an addition (-ffp-contract=off, -fmad=false).
#pragma once

#include "zr/float_cast.hpp"

struct AdamWConstants {  // computed in double, rounded once
  float mul;             // factor of the reduced gradient
  float decay;           // 1 - lr weight_decay
  float beta1, gain1;    // gain = 1 - beta
  float beta2, gain2;
  float rate;  // lr c / (1 - beta1^step), with c = sqrt(1 - beta2^step)
  float eps;   // eps c
};

ZR_ALWAYS_INLINE void adamw_element(const AdamWConstants& c, float grad, float& weight, float& exp_avg,
                                    float& exp_avg_sq) {
#ifdef __CUDA_ARCH__
  const auto root = [](float x) { return __fsqrt_rn(x); };
#else
  const auto root = [](float x) { return __builtin_sqrtf(x); };
#endif
  const float g = grad * c.mul;
  exp_avg = exp_avg * c.beta1 + g * c.gain1;
  exp_avg_sq = exp_avg_sq * c.beta2 + (g * c.gain2) * g;
  weight = weight * c.decay - (exp_avg * c.rate) / (root(exp_avg_sq) + c.eps);
}
