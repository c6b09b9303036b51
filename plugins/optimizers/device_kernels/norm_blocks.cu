// The sums of squares of norm blocks for CUDA: 16 threads add up one block, one lane each.
#include "launch.cuh"
#include "norm_blocks.hpp"

namespace device_kernels {

namespace {
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const __grid_constant__ Launch<NormBatch> launch, int64_t block) {
  const uint32_t number = blockIdx.x * (kThreads / kNormLanes) + threadIdx.x / kNormLanes;
  const uint32_t lane = threadIdx.x % kNormLanes;
  const bool exists = number < launch.first_tile[launch.batch.n];
  double own = 0;
  double* to = nullptr;
  if (exists) {
    const uint32_t index = entry_of(launch.first_tile, launch.batch.n, number);
    const NormView& view = launch.batch.entries[index];
    const int64_t in_view = number - launch.first_tile[index], begin = in_view * block;
    const int64_t count = view.count - begin < block ? view.count - begin : block;
    const float* const values = view.values + begin;
    to = view.sums + in_view;
#pragma unroll 8
    for (int64_t i = lane; i < count; i += kNormLanes) {
      const double x = __ldcs(values + i);
      own += x * x;
    }
  }
  double sum = 0;
  for (uint32_t i = 0; i < kNormLanes; ++i) sum += __shfl_sync(0xffffffffu, own, static_cast<int>(i), kNormLanes);
  if (exists && lane == 0) *to = sum;
}
}  // namespace

void norm_blocks_on_device(const NormBatch& batch, int64_t block, zr_device device, void* native_stream) {
  const Launch<NormBatch> launch = launch_of(batch, block);
  constexpr uint32_t kPerBlock = kThreads / kNormLanes;
  enqueue(norm_kernel, (launch.tiles() + kPerBlock - 1) / kPerBlock, device, native_stream, "norm blocks", launch,
          block);
}

}  // namespace device_kernels
