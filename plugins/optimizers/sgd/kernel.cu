// The kernel of SGD for CUDA.
#include "../device_kernels/launch.cuh"
#include "device_kernel.hpp"

using namespace device_kernels;

namespace {
__global__ void __launch_bounds__(kThreads) sgd_kernel(const __grid_constant__ Launch<SgdBatch> launch) {
  const uint32_t index = entry_of(launch.first_tile, launch.batch.n, blockIdx.x);
  const SgdSlice& slice = launch.batch.entries[index];
  const SgdConstants c = slice.constants;
  const uint32_t tile = blockIdx.x - launch.first_tile[index];
  if (slice.buffer)
    update_tile<1>(slice, &slice.buffer, tile,
                   [&](float grad, float& weight, float* buffer) { sgd_element(c, grad, weight, *buffer); });
  else
    update_tile<0>(slice, nullptr, tile, [&](float grad, float& weight, float*) { sgd_element(c, grad, weight); });
}
}  // namespace

void sgd_on_device(const SgdBatch& batch, zr_device device, void* native_stream) {
  const Launch<SgdBatch> launch = launch_of(batch, kTile);
  enqueue(sgd_kernel, launch.tiles(), device, native_stream, "SGD", launch);
}
