// The kernel of AdamW with 8-bit states for CUDA: a warp updates a block of elements that share a scale.
#include "../device_kernels/launch.cuh"
#include "codes.hpp"
#include "device_kernel.hpp"

using namespace device_kernels;

namespace {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kVectors = kStateBlock / kWarp / kVector;             // per thread
constexpr int64_t kWarpsTile = int64_t{kThreads} / kWarp * kStateBlock;  // elements per block of threads

struct CodeTables {
  codes::SignedTables exp_avg;
  codes::UnsignedTables exp_avg_sq;
};

// The largest number of the warp's threads.
__device__ int32_t largest_in_warp(int32_t number) {
  for (uint32_t step = kWarp / 2; step > 0; step /= 2) {
    const int32_t other = __shfl_xor_sync(0xffffffffu, number, static_cast<int>(step));
    number = other > number ? other : number;
  }
  return number;
}

// The elements of one scale, as kVectors vectors of each thread of a warp.
struct StateBlock {
  const AdamW8Slice& slice;
  int64_t begin, count;  // in the slice; count is at most kStateBlock
  uint32_t lane;
  bool vectors;  // count is kStateBlock, and all arrays are aligned to vectors

  // The index in the block of element e of this thread's vector v.
  __device__ uint32_t at(uint32_t v, uint32_t e) const { return (v * kWarp + lane) * kVector + e; }

  template <class T>
  __device__ void read(T (&values)[kVectors][kVector], const T* array) const {
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      if (vectors) {
        load(values[v], array + begin + at(v, 0));
        continue;
      }
#pragma unroll
      for (uint32_t e = 0; e < kVector; ++e) values[v][e] = at(v, e) < count ? array[begin + at(v, e)] : T{};
    }
  }
  template <class T>
  __device__ void write(T* array, const T (&values)[kVectors][kVector]) const {
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) {
      if (vectors) {
        store(array + begin + at(v, 0), values[v]);
        continue;
      }
#pragma unroll
      for (uint32_t e = 0; e < kVector; ++e)
        if (at(v, e) < count) array[begin + at(v, e)] = values[v][e];
    }
  }
  // Calls fn(v, e) for each element of this thread.
  template <class Fn>
  __device__ void for_each(const Fn& fn) const {
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v)
#pragma unroll
      for (uint32_t e = 0; e < kVector; ++e) fn(v, e);
  }
};

__device__ void update(const StateBlock& block, const CodeTables& tables) {
  const AdamW8Slice& slice = block.slice;
  const AdamWConstants c = slice.constants;
  float* const scale = slice.exp_avg_scale + block.begin / kStateBlock;
  float* const scale_sq = slice.exp_avg_sq_scale + block.begin / kStateBlock;
  float weight[kVectors][kVector], grad[kVectors][kVector], exp_avg[kVectors][kVector], exp_avg_sq[kVectors][kVector];
  uint8_t code[kVectors][kVector], code_sq[kVectors][kVector];
  block.read(weight, slice.weight);
  block.read(grad, slice.grad);
  block.read(code, slice.exp_avg);
  block.read(code_sq, slice.exp_avg_sq);
  const float old_scale = *scale, old_scale_sq = *scale_sq;
  int32_t largest = 0, largest_sq = 0;
  block.for_each([&](uint32_t v, uint32_t e) {
    float &m = exp_avg[v][e], &s = exp_avg_sq[v][e];
    m = codes::signed_ratio(tables.exp_avg, code[v][e]) * old_scale;
    s = codes::unsigned_ratio(tables.exp_avg_sq, code_sq[v][e]) * old_scale_sq;
    adamw_element(c, grad[v][e], weight[v][e], m, s);
    if (block.at(v, e) >= block.count) return;
    largest = max(largest, codes::bits_of_size(m));
    largest_sq = max(largest_sq, codes::bits_of_size(s));
  });
  block.write(slice.weight, weight);
  if (slice.out) {
    uint16_t out[kVectors][kVector];
    block.for_each([&](uint32_t v, uint32_t e) { out[v][e] = rounded(weight[v][e], slice.out_dtype); });
    block.write(slice.out, out);
  }
  const float new_scale = zr::float_of(static_cast<uint32_t>(largest_in_warp(largest)));
  const float new_scale_sq = codes::scale_of_squares(zr::float_of(static_cast<uint32_t>(largest_in_warp(largest_sq))));
  const float inverse = codes::inverse_of(new_scale), inverse_sq = codes::inverse_of(new_scale_sq);
  block.for_each([&](uint32_t v, uint32_t e) {
    code[v][e] = codes::signed_code(tables.exp_avg, exp_avg[v][e] * inverse);
    code_sq[v][e] = codes::unsigned_code(tables.exp_avg_sq, exp_avg_sq[v][e] * inverse_sq);
  });
  block.write(slice.exp_avg, code);
  block.write(slice.exp_avg_sq, code_sq);
  if (block.lane == 0) {
    *scale = new_scale;
    *scale_sq = new_scale_sq;
  }
}

__global__ void __launch_bounds__(kThreads)
    adamw8_kernel(const __grid_constant__ Launch<AdamW8Batch> launch, const __grid_constant__ CodeTables parameter) {
  // Threads read different entries at once, which takes longer from parameters than from shared memory.
  constexpr uint32_t kNumbers = sizeof(CodeTables) / sizeof(float);
  __shared__ CodeTables tables;
  if (threadIdx.x < kNumbers)
    reinterpret_cast<float*>(&tables)[threadIdx.x] = reinterpret_cast<const float*>(&parameter)[threadIdx.x];
  __syncthreads();
  const uint32_t entry = entry_of(launch.first_tile, launch.batch.n, blockIdx.x);
  const AdamW8Slice& slice = launch.batch.entries[entry];
  const int64_t begin = static_cast<int64_t>(blockIdx.x - launch.first_tile[entry]) * kWarpsTile +
                        static_cast<int64_t>(threadIdx.x / kWarp) * kStateBlock;
  if (begin >= slice.count) return;
  const int64_t count = min(slice.count - begin, kStateBlock);
  const bool aligned = is_aligned(slice.weight, 16) && is_aligned(slice.grad, 16) && is_aligned(slice.out, 8) &&
                       is_aligned(slice.exp_avg, 4) && is_aligned(slice.exp_avg_sq, 4);
  update({slice, begin, count, threadIdx.x % kWarp, aligned && count == kStateBlock}, tables);
}

}  // namespace

void adamw8_on_device(const AdamW8Batch& batch, zr_device device, void* native_stream) {
  const Launch<AdamW8Batch> launch = launch_of(batch, kWarpsTile);
  enqueue(adamw8_kernel, launch.tiles(), device, native_stream, "AdamW with 8-bit states", launch,
          CodeTables{codes::kSigned, codes::kUnsigned});
}
