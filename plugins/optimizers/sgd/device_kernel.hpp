// The update of SGD on a device: kernel.cu for CUDA, tests/simulators/sim_optimizer for the simulated device of the
// tests.
#pragma once

#include "../device_kernels/batch.hpp"
#include "element.hpp"

struct SgdSlice : device_kernels::SliceArrays {
  float* buffer;  // momentum_buffer, or null without momentum
  SgdConstants constants;
};
using SgdBatch = device_kernels::Batch<SgdSlice, 256>;

/// Enqueues on the native stream of the device; throws zr::PluginError if the launch fails.
void sgd_on_device(const SgdBatch& batch, zr_device device, void* native_stream);
