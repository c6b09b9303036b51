// Kernels for CUDA whose parameter is a batch: one block of threads for each tile of its entries.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "../../comm_cuda_ipc/current_device.hpp"
#include "batch.hpp"
#include "zr/base.hpp"
#include "zr/float_cast.hpp"

namespace device_kernels {

constexpr uint32_t kThreads = 256;  // per block
constexpr uint32_t kVector = 4;     // elements per load
constexpr int64_t kTile = 4096;     // elements per block of threads

/// A batch whose entries are cut into tiles.
template <class B>
struct Launch {
  B batch;
  uint32_t first_tile[B::kEntries + 1];  // by entry; the last: of all entries
  uint32_t tiles() const { return first_tile[batch.n]; }
};

/// The launch of a batch, with `tile` elements per tile.
template <class B>
Launch<B> launch_of(const B& batch, int64_t tile) {
  static_assert(sizeof(Launch<B>) <= 32764 - 512,
                "parameters of a kernel, of which other parameters take up to 512 bytes");
  Launch<B> launch;
  launch.batch.n = batch.n;
  uint32_t tiles = 0;
  for (uint32_t i = 0; i < batch.n; ++i) {
    launch.batch.entries[i] = batch.entries[i];
    launch.first_tile[i] = tiles;
    tiles += static_cast<uint32_t>((batch.entries[i].count + tile - 1) / tile);
  }
  launch.first_tile[batch.n] = tiles;
  return launch;
}

/// The entry of an ascending list of n + 1 numbers, of which the first is 0, that `number` belongs to.
__device__ inline uint32_t entry_of(const uint32_t* first, uint32_t n, uint32_t number) {
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

__device__ inline uint16_t rounded(float value, zr_dtype dtype) {
  return dtype == ZR_BF16 ? zr::to_bf16(value) : zr::to_f16(value);
}

__device__ inline bool is_aligned(const void* address, uint64_t bytes) {
  return reinterpret_cast<uint64_t>(address) % bytes == 0;
}

// Vectors of elements. They are read and written once, so they do not have to stay in the cache.
__device__ inline void load(float (&values)[kVector], const float* from) {
  const float4 v = __ldcs(reinterpret_cast<const float4*>(from));
  values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
}
__device__ inline void load(uint8_t (&values)[kVector], const uint8_t* from) {
  const uchar4 v = __ldcs(reinterpret_cast<const uchar4*>(from));
  values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
}
__device__ inline void store(float* to, const float (&values)[kVector]) {
  __stcs(reinterpret_cast<float4*>(to), make_float4(values[0], values[1], values[2], values[3]));
}
__device__ inline void store(uint16_t* to, const uint16_t (&values)[kVector]) {
  __stcs(reinterpret_cast<ushort4*>(to), make_ushort4(values[0], values[1], values[2], values[3]));
}
__device__ inline void store(uint8_t* to, const uint8_t (&values)[kVector]) {
  __stcs(reinterpret_cast<uchar4*>(to), make_uchar4(values[0], values[1], values[2], values[3]));
}

/// Updates a tile of kTile elements of a slice that has K states, as one block of threads: update(grad, weight, states)
/// for each element, with `states` an array of K numbers.
template <int K, class Update>
__device__ void update_tile(const SliceArrays& slice, float* const* states_of_slice, uint32_t tile,
                            const Update& update) {
  constexpr int kArrays = K > 0 ? K : 1;
  const int64_t begin = static_cast<int64_t>(tile) * kTile;
  const int64_t count = slice.count - begin < kTile ? slice.count - begin : kTile;
  float* const weight = slice.weight + begin;
  const float* const grad = slice.grad + begin;
  uint16_t* const out = slice.out ? slice.out + begin : nullptr;
  float* states[kArrays];
  bool vectors = is_aligned(weight, 16) && is_aligned(grad, 16) && is_aligned(out, 8);
  for (int s = 0; s < K; ++s) {
    states[s] = states_of_slice[s] + begin;
    vectors = vectors && is_aligned(states[s], 16);
  }
  int64_t done = 0;
  if (vectors) {
    done = count / kVector * kVector;
#pragma unroll 2
    for (int64_t i = threadIdx.x * kVector; i < done; i += kThreads * kVector) {
      float w[kVector], g[kVector], of_states[kArrays][kVector];
      load(w, weight + i);
      for (int s = 0; s < K; ++s) load(of_states[s], states[s] + i);
      load(g, grad + i);
      for (uint32_t e = 0; e < kVector; ++e) {
        float own[kArrays];
        for (int s = 0; s < K; ++s) own[s] = of_states[s][e];
        update(g[e], w[e], own);
        for (int s = 0; s < K; ++s) of_states[s][e] = own[s];
      }
      store(weight + i, w);
      for (int s = 0; s < K; ++s) store(states[s] + i, of_states[s]);
      if (!out) continue;
      uint16_t low[kVector];
      for (uint32_t e = 0; e < kVector; ++e) low[e] = rounded(w[e], slice.out_dtype);
      store(out + i, low);
    }
  }
  for (int64_t i = done + threadIdx.x; i < count; i += kThreads) {
    float w = weight[i], own[kArrays];
    for (int s = 0; s < K; ++s) own[s] = states[s][i];
    update(grad[i], w, own);
    weight[i] = w;
    for (int s = 0; s < K; ++s) states[s][i] = own[s];
    if (out) out[i] = rounded(w, slice.out_dtype);
  }
}

/// Throws zr::PluginError if `error` is one; `call`: what failed.
inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  if (error == cudaErrorNoKernelImageForDevice)
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "this library has no code for the compute capability of this GPU: build it with "
                          "ZR_CUDA_ARCHITECTURES, or set offload.optimizer = \"cpu\" to update on the CPU",
                          error);
  throw zr::PluginError(error == cudaErrorMemoryAllocation ? ZR_NOMEM : ZR_IO,
                        std::string("CUDA: ") + call + ": " + cudaGetErrorString(error), error);
}

/// Enqueues `blocks` blocks of threads of a kernel.
template <class... Parameters, class... Arguments>
void enqueue(void (*kernel)(Parameters...), uint32_t blocks, zr_device device, void* native_stream, const char* name,
             const Arguments&... arguments) {
  if (blocks == 0) return;
  const cuda_calls::CurrentDevice current(device.id);
  check(current.error(), "cudaSetDevice");
  check(cuda_calls::launch(kernel, blocks, kThreads, static_cast<cudaStream_t>(native_stream), arguments...), name);
}

}  // namespace device_kernels
