// Casts between fp32 and bf16 or fp16, without instructions that only some machines have: the same bits everywhere, and
// loops over them vectorise. Always inlined, so that kernels compiled for several instruction sets never share a copy.
#pragma once

#include <cstdint>
#include <cstring>

// Every kernel gets a copy of its own, for its instruction set. nvcc compiles it for the CPU and the GPU.
#ifdef __CUDACC__
#define ZR_ALWAYS_INLINE __host__ __device__ __forceinline__
#else
#define ZR_ALWAYS_INLINE __attribute__((always_inline)) inline
#endif

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// The bits of a float.
ZR_ALWAYS_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
/// The float of these bits.
ZR_ALWAYS_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Rounds to nearest, ties to even; a NaN becomes 0x7fc0, as in libtorch.
ZR_ALWAYS_INLINE uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
/// Exact: every bf16 value is an fp32 value.
ZR_ALWAYS_INLINE float from_bf16(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

/// Rounds to nearest, ties to even; magnitudes of 65504 + half a step (65520) and more become infinity; a NaN becomes
/// 0x7e00 with its sign.
ZR_ALWAYS_INLINE uint16_t to_f16(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  // Below 2^-14 the spacing of fp16 is 2^-24, which is the spacing of fp32 in [0.5, 1): the addition rounds.
  const uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (size - 0x38000000u + 0x0fffu + ((size >> 13) & 1u)) >> 13;
  const uint32_t beyond = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return static_cast<uint16_t>(sign | (size < 0x38800000u ? small : size < 0x47800000u ? normal : beyond));
}
/// Exact: every fp16 value is an fp32 value.
ZR_ALWAYS_INLINE float from_f16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16, size = value & 0x7fffu;
  const float small = float_of(0x3f000000u + size) - 0.5f;  // size steps of 2^-24, exact
  const uint32_t normal = (size << 13) + 0x38000000u;
  const uint32_t beyond = 0x7f800000u | (size & 0x3ffu) << 13;
  return float_of(sign | (size < 0x0400u ? bits_of(small) : size < 0x7c00u ? normal : beyond));
}

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
