// What kernels for CUDA and their launches use of the CUDA runtime, for a C++ compiler: a launch runs the grid on
// threads of the CPU before it returns. So tests run the sources of kernels, with their indices, vectors, shared memory
// and exchanges within a warp, on machines without a GPU. Memory is memory of the host; streams are ignored.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static  // one block runs at a time

namespace cuda_on_cpu {

struct Index {
  unsigned x = 0;
};

inline std::atomic<int> launches = 0;  // of this process

/// Runs `kernel` once for each thread of each block, the blocks one after the other.
void run_grid(unsigned blocks, unsigned threads_of_block, const std::function<void()>& kernel);
void wait_for_block();
/// The value that the lane `from` of this thread's warp passes to the same call. All threads of a warp must call it.
uint64_t exchange_in_warp(uint64_t value, unsigned from);

/// A vector access at an address that the GPU would not accept ends the process.
template <class T>
void check_alignment(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) == 0) return;
  std::fprintf(stderr, "cuda_on_cpu: misaligned access of %zu bytes at %p\n", sizeof(T), address);
  std::abort();
}

}  // namespace cuda_on_cpu

inline thread_local cuda_on_cpu::Index threadIdx, blockIdx, blockDim, gridDim;

struct float4 {
  float x, y, z, w;
};
struct uchar4 {
  unsigned char x, y, z, w;
};
struct ushort4 {
  unsigned short x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uchar4 make_uchar4(unsigned char x, unsigned char y, unsigned char z, unsigned char w) { return {x, y, z, w}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
  return {x, y, z, w};
}

template <class T>
T __ldcs(const T* address) {
  cuda_on_cpu::check_alignment(address);
  return *address;
}
template <class T>
void __stcs(T* address, T value) {
  cuda_on_cpu::check_alignment(address);
  *address = value;
}

inline void __syncthreads() { cuda_on_cpu::wait_for_block(); }
template <class T>
T __shfl_sync(unsigned /*mask*/, T value, int lane, int width = 32) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  const unsigned own = threadIdx.x % 32, size = static_cast<unsigned>(width);
  bits = cuda_on_cpu::exchange_in_warp(bits, own / size * size + static_cast<unsigned>(lane) % size);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ bits);
}

template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorNoKernelImageForDevice = 209 };
inline const char* cudaGetErrorString(cudaError_t) { return "an error of CUDA"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

struct cudaLaunchConfig_t {
  cuda_on_cpu::Index gridDim, blockDim;
  cudaStream_t stream;
};
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  ++cuda_on_cpu::launches;
  cuda_on_cpu::run_grid(config->gridDim.x, config->blockDim.x, [&] { kernel(arguments...); });
  return cudaSuccess;
}
