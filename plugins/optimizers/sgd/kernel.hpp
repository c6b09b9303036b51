// The arithmetic of SGD for one run. README.md has the order of operations.
#pragma once

#include <cstdint>

#include "zr/abi/base.h"
#include "zr/isa.hpp"

struct SgdConstants {  // computed in double, rounded once
  float mul;           // factor of the reduced gradient
  float weight_decay, momentum;
  float gain;  // 1 - dampening
  float lr;
  bool decays;  // weight_decay is not zero
  bool first;   // first update: the buffer becomes the gradient
  bool nesterov;
};

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
