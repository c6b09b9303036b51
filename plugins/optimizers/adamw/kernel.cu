// The kernels of AdamW for CUDA. Each launch takes many slices, whose addresses are parameters of the kernel.
#include <cuda_runtime.h>

#include <string>

#include "device_kernel.hpp"
#include "zr/base.hpp"
#include "zr/float_cast.hpp"

namespace {

constexpr uint32_t kThreads = 256;
constexpr int64_t kTile = 4096;  // elements per block of threads
constexpr uint32_t kVector = 4;  // elements per load
constexpr uint32_t kLanes = 16;  // sums of a norm block

struct AdamWLaunch {
  AdamWBatch batch;
  uint32_t first_tile[AdamWBatch::kSlices + 1];  // by slice; the last: of all slices
};
struct NormLaunch {
  NormBatch batch;
  uint32_t first_block[NormBatch::kViews + 1];  // by view; the last: of all views
};
static_assert(sizeof(AdamWLaunch) <= 32764 && sizeof(NormLaunch) <= 32764, "parameters of a kernel");

// The entry of an ascending list of n + 1 numbers, of which the first is 0, that `number` belongs to.
__device__ uint32_t entry_of(const uint32_t* first, uint32_t n, uint32_t number) {
  uint32_t low = 0;
  for (uint32_t high = n; high - low > 1;) {
    const uint32_t middle = (low + high) / 2;
    if (first[middle] <= number)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__device__ uint16_t rounded(float value, zr_dtype dtype) {
  return dtype == ZR_BF16 ? zr::to_bf16(value) : zr::to_f16(value);
}

__device__ bool is_aligned(const void* address, uint64_t bytes) {
  return reinterpret_cast<uint64_t>(address) % bytes == 0;
}

// Elements are read and written once, so they do not have to stay in the cache.
__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ AdamWLaunch launch) {
  const uint32_t index = entry_of(launch.first_tile, launch.batch.n, blockIdx.x);
  const AdamWSlice& slice = launch.batch.slices[index];
  const AdamWConstants c = slice.constants;
  const int64_t begin = static_cast<int64_t>(blockIdx.x - launch.first_tile[index]) * kTile;
  const int64_t count = slice.count - begin < kTile ? slice.count - begin : kTile;
  float* const weight = slice.weight + begin;
  const float* const grad = slice.grad + begin;
  float* const exp_avg = slice.exp_avg + begin;
  float* const exp_avg_sq = slice.exp_avg_sq + begin;
  uint16_t* const out = slice.out ? slice.out + begin : nullptr;
  const bool vectors = is_aligned(weight, 16) && is_aligned(grad, 16) && is_aligned(exp_avg, 16) &&
                       is_aligned(exp_avg_sq, 16) && is_aligned(out, 8);
  int64_t done = 0;
  if (vectors) {
    done = count / kVector * kVector;
#pragma unroll 2
    for (int64_t i = threadIdx.x * kVector; i < done; i += kThreads * kVector) {
      float4 w = __ldcs(reinterpret_cast<const float4*>(weight + i));
      float4 m = __ldcs(reinterpret_cast<const float4*>(exp_avg + i));
      float4 v = __ldcs(reinterpret_cast<const float4*>(exp_avg_sq + i));
      const float4 g = __ldcs(reinterpret_cast<const float4*>(grad + i));
      adamw_element(c, g.x, w.x, m.x, v.x);
      adamw_element(c, g.y, w.y, m.y, v.y);
      adamw_element(c, g.z, w.z, m.z, v.z);
      adamw_element(c, g.w, w.w, m.w, v.w);
      __stcs(reinterpret_cast<float4*>(weight + i), w);
      __stcs(reinterpret_cast<float4*>(exp_avg + i), m);
      __stcs(reinterpret_cast<float4*>(exp_avg_sq + i), v);
      if (out)
        __stcs(reinterpret_cast<ushort4*>(out + i),
               make_ushort4(rounded(w.x, slice.out_dtype), rounded(w.y, slice.out_dtype), rounded(w.z, slice.out_dtype),
                            rounded(w.w, slice.out_dtype)));
    }
  }
  for (int64_t i = done + threadIdx.x; i < count; i += kThreads) {
    float w = weight[i], m = exp_avg[i], v = exp_avg_sq[i];
    adamw_element(c, grad[i], w, m, v);
    weight[i] = w;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if (out) out[i] = rounded(w, slice.out_dtype);
  }
}

// 16 threads add up one norm block, one lane each.
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const __grid_constant__ NormLaunch launch, int64_t block, double* sums) {
  const uint32_t number = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const uint32_t lane = threadIdx.x % kLanes;
  const bool exists = number < launch.first_block[launch.batch.n];
  double own = 0;
  if (exists) {
    const uint32_t view = entry_of(launch.first_block, launch.batch.n, number);
    const int64_t begin = static_cast<int64_t>(number - launch.first_block[view]) * block;
    const int64_t left = launch.batch.counts[view] - begin, count = left < block ? left : block;
    const float* const values = launch.batch.values[view] + begin;
#pragma unroll 8
    for (int64_t i = lane; i < count; i += kLanes) {
      const double x = __ldcs(values + i);
      own += x * x;
    }
  }
  double sum = 0;
  for (uint32_t i = 0; i < kLanes; ++i) sum += __shfl_sync(0xffffffffu, own, static_cast<int>(i), kLanes);
  if (exists && lane == 0) sums[number] = sum;
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  if (error == cudaErrorNoKernelImageForDevice)
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "this library has no code for the compute capability of this GPU: build it with "
                          "ZR_CUDA_ARCHITECTURES, or set offload.optimizer = \"cpu\" to update on the CPU",
                          error);
  throw zr::PluginError(error == cudaErrorMemoryAllocation ? ZR_NOMEM : ZR_IO,
                        std::string("CUDA: ") + call + ": " + cudaGetErrorString(error), error);
}

// While it lives, the device is the current one of the thread, to which a launch goes.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace

void adamw_on_device(const AdamWBatch& batch, zr_device device, void* native_stream) {
  AdamWLaunch launch;
  launch.batch.n = batch.n;
  uint32_t tiles = 0;
  for (uint32_t i = 0; i < batch.n; ++i) {
    launch.batch.slices[i] = batch.slices[i];
    launch.first_tile[i] = tiles;
    tiles += static_cast<uint32_t>((batch.slices[i].count + kTile - 1) / kTile);
  }
  launch.first_tile[batch.n] = tiles;
  if (tiles == 0) return;
  const CurrentDevice current(device.id);
  adamw_kernel<<<tiles, kThreads, 0, static_cast<cudaStream_t>(native_stream)>>>(launch);
  check(cudaGetLastError(), "AdamW");
}

void norm_blocks_on_device(const NormBatch& batch, int64_t block, double* sums, zr_device device, void* native_stream) {
  NormLaunch launch;
  launch.batch.n = batch.n;
  uint32_t blocks = 0;
  for (uint32_t i = 0; i < batch.n; ++i) {
    launch.batch.values[i] = batch.values[i];
    launch.batch.counts[i] = batch.counts[i];
    launch.first_block[i] = blocks;
    blocks += static_cast<uint32_t>((batch.counts[i] + block - 1) / block);
  }
  launch.first_block[batch.n] = blocks;
  if (blocks == 0) return;
  const CurrentDevice current(device.id);
  constexpr uint32_t kPerGroup = kThreads / kLanes;
  norm_kernel<<<(blocks + kPerGroup - 1) / kPerGroup, kThreads, 0, static_cast<cudaStream_t>(native_stream)>>>(
      launch, block, sums);
  check(cudaGetLastError(), "norm blocks");
}
