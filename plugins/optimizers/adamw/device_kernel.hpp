// The update of AdamW on a device: kernel.cu for CUDA, tests/simulators/sim_optimizer for the simulated device of the
// tests.
#pragma once

#include "../device_kernels/batch.hpp"
#include "element.hpp"

struct AdamWSlice : device_kernels::SliceArrays {
  float* states[2];  // exp_avg, exp_avg_sq
  AdamWConstants constants;
};
inline AdamWSlice adamw_slice(const zr_update_slice& slice, const AdamWConstants& constants) {
  return {
      device_kernels::arrays_of(slice), {zr::data<float>(slice.slots[0]), zr::data<float>(slice.slots[1])}, constants};
}
using AdamWBatch = device_kernels::Batch<AdamWSlice, 256>;

/// Enqueues on the native stream of the device; throws zr::PluginError if the launch fails.
void adamw_on_device(const AdamWBatch& batch, zr_device device, void* native_stream);
