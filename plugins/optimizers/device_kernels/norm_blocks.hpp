// The sums of squares for the gradient norm: norm_blocks.cu for CUDA, tests/simulators/sim_optimizer for the simulated
// device of the tests. zr_optimizer_device_api has the order of operations.
#pragma once

#include "batch.hpp"

namespace device_kernels {

constexpr uint32_t kNormLanes = 16;  // sums of a norm block

struct NormView {
  const float* values;
  int64_t count;
  double* sums;  // one per block of the view
};
using NormBatch = Batch<NormView, 1024>;

/// Enqueues the sums of all blocks of `block` elements on the native stream of the device; throws zr::PluginError if
/// the launch fails.
void norm_blocks_on_device(const NormBatch& batch, int64_t block, zr_device device, void* native_stream);

}  // namespace device_kernels
