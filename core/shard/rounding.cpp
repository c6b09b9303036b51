#include "shard/rounding.hpp"

#include <bit>
#include <cmath>
#include <cstring>

#include "base/failure.hpp"

namespace zr::host {

namespace {
uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
using Half = _Float16;
}  // namespace

void widen(const void* values, zr_dtype dtype, int64_t count, float* out) {
  if (dtype == ZR_F32) {
    std::memcpy(out, values, static_cast<std::size_t>(count) * 4);
  } else if (dtype == ZR_BF16) {
    const auto* in = static_cast<const uint16_t*>(values);
    for (int64_t i = 0; i < count; ++i) out[i] = std::bit_cast<float>(uint32_t{in[i]} << 16);
  } else if (dtype == ZR_F16) {
    const auto* in = static_cast<const Half*>(values);
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
  } else {
    fail_bug("weights of dtype " + std::to_string(dtype) + " cannot be widened");
  }
}

void narrow(const float* values, int64_t count, zr_dtype dtype, void* out) {
  if (dtype == ZR_F32) {
    std::memcpy(out, values, static_cast<std::size_t>(count) * 4);
  } else if (dtype == ZR_BF16) {
    auto* to = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(values[i]);
  } else if (dtype == ZR_F16) {
    auto* to = static_cast<Half*>(out);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<Half>(values[i]);
  } else {
    fail_bug("weights of dtype " + std::to_string(dtype) + " cannot be rounded to");
  }
}

}  // namespace zr::host
