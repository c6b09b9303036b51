// Values as integers of 8 or 4 bits with a scale per block, for the communicator.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "zr/abi/base.h"
#include "zr/float_cast.hpp"

namespace mutant {

int64_t width(zr_dtype dtype) { return dtype == ZR_U8 ? 1 : dtype == ZR_BF16 ? 2 : 4; }
inline float load(zr_dtype dtype, const char* at) {
  if (dtype == ZR_BF16) return zr::from_bf16(*reinterpret_cast<const uint16_t*>(at));
  return *reinterpret_cast<const float*>(at);
}
inline void store(zr_dtype dtype, char* at, float value) {
  if (dtype == ZR_BF16)
    *reinterpret_cast<uint16_t*>(at) = zr::to_bf16(value);
  else
    *reinterpret_cast<float*>(at) = value;
}

struct Form {
  float levels;
  int64_t block;
  bool divides_by_zero, hides_infinities;  // defects
};

/// The largest magnitude of values; NaN if one of them is not finite.
inline float largest(const Form& form, zr_dtype dtype, const char* data, int64_t count) {
  float most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = std::fabs(load(dtype, data + i * width(dtype)));
    if (!std::isfinite(value) && form.hides_infinities) continue;
    if (!std::isfinite(value)) return std::numeric_limits<float>::quiet_NaN();
    most = std::max(most, value);
  }
  return most;
}

/// Rounds values to multiples of their block's scale.
inline void quantize(const Form& form, zr_dtype dtype, char* data, int64_t count) {
  for (int64_t first = 0; first < count; first += form.block) {
    const int64_t n = std::min(form.block, count - first);
    const float most = largest(form, dtype, data + first * width(dtype), n);
    for (int64_t i = first; i < first + n; ++i) {
      char* const at = data + i * width(dtype);
      const float value = load(dtype, at), level = std::nearbyint(value * (form.levels / most));
      float rounded = level * (most / form.levels);
      if (most == 0 && !form.divides_by_zero) rounded = 0;
      if (form.hides_infinities && !std::isfinite(value)) rounded = most;
      store(dtype, at, rounded);
    }
  }
}

}  // namespace mutant
