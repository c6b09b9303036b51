// The arithmetic of SGD for one run. docs/numerics.md, section 9, has the order.
#pragma once

#include <cstdint>

#include "element.hpp"
#include "zr/abi/base.h"
#include "zr/isa.hpp"

struct SgdRun {
  float* weight;  // the fp32 master weight
  const float* grad;
  float* buffer;  // momentum_buffer, or null without momentum
  int64_t count;
  uint16_t* out;  // the rounded weight, or null
  zr_dtype out_dtype;
  bool streams;  // write `out` with non-temporal stores
};

ZR_KERNEL(void sgd(const SgdConstants& constants, const SgdRun& run))
