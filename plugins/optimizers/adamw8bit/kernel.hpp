// The arithmetic of AdamW with 8-bit states for one slice. docs/optimizers.md has order and codes.
#pragma once

#include <cstdint>

#include "../adamw/kernel.hpp"

constexpr int64_t kStateBlock = 256;  // elements that share a scale

struct AdamW8Run {
  float* weight;  // the fp32 master weight
  const float* grad;
  uint8_t* exp_avg;  // codes, and the scale of each block
  uint8_t* exp_avg_sq;
  float* exp_avg_scale;
  float* exp_avg_sq_scale;
  int64_t count;
  uint16_t* out;  // the rounded weight, or null
  zr_dtype out_dtype;
};

ZR_KERNEL(void adamw8(const AdamWConstants& constants, const AdamW8Run& run))
