// The update of AdamW with 8-bit states on a device: kernel.cu for CUDA, tests/simulators/sim_optimizer for the
// simulated device of the tests. Slices with fp32 states are updated by adamw_on_device().
#pragma once

#include "../device_kernels/batch.hpp"
#include "kernel.hpp"

struct AdamW8Slice : device_kernels::SliceArrays {
  uint8_t* exp_avg;  // codes, and the scale of each block of kStateBlock elements
  uint8_t* exp_avg_sq;
  float* exp_avg_scale;
  float* exp_avg_sq_scale;
  AdamWConstants constants;
};
using AdamW8Batch = device_kernels::Batch<AdamW8Slice, 256>;

/// Enqueues on the native stream of the device; throws zr::PluginError if the launch fails.
void adamw8_on_device(const AdamW8Batch& batch, zr_device device, void* native_stream);
