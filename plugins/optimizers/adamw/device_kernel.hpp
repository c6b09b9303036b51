// The update and the norm blocks of AdamW on a device: kernel.cu for CUDA, tests/support/sim_optimizer for the
// simulated device of the tests.
#pragma once

#include <cstdint>

#include "element.hpp"
#include "zr/abi/base.h"

struct AdamWSlice {
  float* weight;  // the fp32 master weight
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  uint16_t* out;  // the rounded weight, or null
  int64_t count;
  AdamWConstants constants;
  zr_dtype out_dtype;
};

/// The slices of one launch: as many as fit the 32 KB of a kernel's parameters.
struct AdamWBatch {
  static constexpr uint32_t kSlices = 256;
  uint32_t n = 0;
  uint32_t unused = 0;
  AdamWSlice slices[kSlices];
};

/// Views whose blocks one launch adds up.
struct NormBatch {
  static constexpr uint32_t kViews = 1024;
  uint32_t n = 0;
  uint32_t unused = 0;
  const float* values[kViews];
  int64_t counts[kViews];
};

/// Both enqueue on the native stream of the device, and throw zr::PluginError if the launch fails.
void adamw_on_device(const AdamWBatch& batch, zr_device device, void* native_stream);
/// sums: of the batch's blocks of `block` elements, in the order of the views.
void norm_blocks_on_device(const NormBatch& batch, int64_t block, double* sums, zr_device device, void* native_stream);
