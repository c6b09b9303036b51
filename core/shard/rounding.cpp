#include "shard/rounding.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/dtype.hpp"
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

void adopt(const void* values, zr_dtype dtype, int64_t count, float* master) {
  constexpr int64_t kBlock = 1024;
  const int64_t size = size_of(dtype);
  std::array<float, kBlock> wide, rounded;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = std::min(kBlock, count - at);
    const char* from = static_cast<const char*>(values) + at * size;
    narrow(master + at, n, dtype, rounded.data());
    if (std::memcmp(rounded.data(), from, static_cast<std::size_t>(n * size)) == 0) continue;
    widen(from, dtype, n, wide.data());
    for (int64_t i = 0; i < n; ++i)
      if (std::memcmp(reinterpret_cast<const char*>(rounded.data()) + i * size, from + i * size,
                      static_cast<std::size_t>(size)) != 0)
        master[at + i] = wide[static_cast<std::size_t>(i)];
  }
}

}  // namespace zr::host
