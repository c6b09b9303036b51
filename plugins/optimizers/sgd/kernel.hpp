// The arithmetic of SGD over one run. README.md has the order of operations.
#pragma once

#include <cstdint>

#include "zr/abi/base.h"
#include "zr/isa.hpp"

struct SgdConstants {  // computed in double, rounded once
  float mul;           // what the gradient sum is multiplied by
  float weight_decay, momentum;
  float gain;  // 1 - dampening
  float lr;
  bool decays;  // weight_decay is not zero
  bool first;   // the buffer starts as the gradient
  bool nesterov;
};

struct SgdRun {
  float* weight;  // the fp32 master
  const float* grad;
  float* buffer;  // momentum_buffer, or null without momentum
  int64_t count;
  uint16_t* out;  // the rounded weight, or null
  zr_dtype out_dtype;
  bool streams;  // write `out` past the cache
};

ZR_KERNEL(void sgd(const SgdConstants& constants, const SgdRun& run))
