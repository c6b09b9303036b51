// The arithmetic of LAMB for one slice, with the arrays of AdamW. docs/optimizers.md has the order.
#pragma once

#include <cstdint>

#include "../adamw/kernel.hpp"

struct LambConstants {  // computed in double, rounded once
  float mul;            // factor of the reduced gradient
  float beta1, gain1;   // gain = 1 - beta
  float beta2, gain2;
  float unbias1, unbias2;  // 1 / (1 - beta1^step), 1 / sqrt(1 - beta2^step)
  float eps;
  float weight_decay;
  float rate;  // lr times the trust ratio; of the update only
};

// Updates the moments and adds up, per block of `block` elements, the squares of the weights (sums[0]) and of the
// direction of the update (sums[1]); those of the next block follow.
ZR_KERNEL(void lamb_moments(const LambConstants& constants, const AdamWRun& run, int64_t block, double* sums))
// Changes the weights.
ZR_KERNEL(void lamb_update(const LambConstants& constants, const AdamWRun& run))
