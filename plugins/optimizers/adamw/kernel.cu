// The kernel of AdamW for CUDA.
#include "../device_kernels/launch.cuh"
#include "device_kernel.hpp"

using namespace device_kernels;

namespace {
__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ Launch<AdamWBatch> launch) {
  const uint32_t index = entry_of(launch.first_tile, launch.batch.n, blockIdx.x);
  const AdamWSlice& slice = launch.batch.entries[index];
  const AdamWConstants c = slice.constants;
  update_tile<2>(
      slice, slice.states, blockIdx.x - launch.first_tile[index],
      [&](float grad, float& weight, float* states) { adamw_element(c, grad, weight, states[0], states[1]); });
}
}  // namespace

void adamw_on_device(const AdamWBatch& batch, zr_device device, void* native_stream) {
  const Launch<AdamWBatch> launch = launch_of(batch, kTile);
  enqueue(adamw_kernel, launch.tiles(), device, native_stream, "AdamW", launch);
}
