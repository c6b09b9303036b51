// Casts between fp32 sums and the types of elements.
#pragma once

#include <cstdint>
#include <cstring>

#include "zr/abi/base.h"
#include "zr/float_cast.hpp"

namespace mpi {

// Casts each element with the function for the 16-bit type; copies fp32.
template <class To, class From, class Bf16, class F16>
void cast(void* to, const void* from, zr_dtype dtype, int64_t count, Bf16&& bf16, F16&& f16) {
  auto* const out = static_cast<To*>(to);
  const auto* const in = static_cast<const From*>(from);
  if (dtype == ZR_F32 && to != from) std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  for (int64_t i = 0; dtype == ZR_BF16 && i < count; ++i) out[i] = bf16(in[i]);
  for (int64_t i = 0; dtype == ZR_F16 && i < count; ++i) out[i] = f16(in[i]);
}

/// Exact. `from` has elements of `dtype`.
inline void upcast(float* to, const void* from, zr_dtype dtype, int64_t count) {
  cast<float, uint16_t>(
      to, from, dtype, count, [](uint16_t x) { return zr::from_bf16(x); }, [](uint16_t x) { return zr::from_f16(x); });
}

/// To elements of `dtype`, to the nearest.
inline void round_to(void* to, zr_dtype dtype, const float* from, int64_t count) {
  cast<uint16_t, float>(
      to, from, dtype, count, [](float x) { return zr::to_bf16(x); }, [](float x) { return zr::to_f16(x); });
}

}  // namespace mpi
