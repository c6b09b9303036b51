// The arithmetic of AdamW for one run. docs/numerics.md, section 9, has the order.
#pragma once

#include <cstdint>

#include "element.hpp"
#include "zr/abi/base.h"
#include "zr/isa.hpp"

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
