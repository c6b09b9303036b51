// The arithmetic of AdamW for one run. README.md has the order of operations.
#pragma once

#include <cstdint>

#include "zr/abi/base.h"
#include "zr/isa.hpp"

struct AdamWConstants {  // computed in double, rounded once
  float mul;             // factor of the reduced gradient
  float decay;           // 1 - lr weight_decay
  float beta1, gain1;    // gain = 1 - beta
  float beta2, gain2;
  float rate;  // lr c / (1 - beta1^step), with c = sqrt(1 - beta2^step)
  float eps;   // eps c
};

struct AdamWRun {
  float* weight;  // the fp32 master weight
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  int64_t count;
  uint16_t* out;  // the rounded weight, or null
  zr_dtype out_dtype;
  bool streams;  // write `out` with non-temporal stores
};

ZR_KERNEL(void adamw(const AdamWConstants& constants, const AdamWRun& run))
