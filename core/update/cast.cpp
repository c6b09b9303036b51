#include "update/cast.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "zr/float_cast.hpp"

namespace zr::host::update {

void upcast(const void* values, zr_dtype dtype, int64_t count, float* out) {
  const auto* in = static_cast<const uint16_t*>(values);
  if (count == 0) return;  // the pointers may be null
  if (dtype == ZR_F32) {
    std::memcpy(out, values, static_cast<std::size_t>(count) * 4);
  } else if (dtype == ZR_BF16) {
    for (int64_t i = 0; i < count; ++i) out[i] = from_bf16(in[i]);
  } else if (dtype == ZR_F16) {
    for (int64_t i = 0; i < count; ++i) out[i] = from_f16(in[i]);
  } else {
    fail_internal(fmt::format("cannot upcast elements of dtype {} to fp32", dtype));
  }
}

void downcast(const float* values, int64_t count, zr_dtype dtype, void* out) {
  auto* to = static_cast<uint16_t*>(out);
  if (count == 0) return;  // the pointers may be null
  if (dtype == ZR_F32) {
    std::memcpy(out, values, static_cast<std::size_t>(count) * 4);
  } else if (dtype == ZR_BF16) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(values[i]);
  } else if (dtype == ZR_F16) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_f16(values[i]);
  } else {
    fail_internal(fmt::format("cannot downcast fp32 elements to dtype {}", dtype));
  }
}

bool sync_master_from_weights(const void* values, zr_dtype dtype, int64_t count, float* master) {
  constexpr int64_t kBlock = 1024;
  const int64_t size = size_of(dtype);
  std::array<float, kBlock> wide, rounded;
  bool any = false;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t n = std::min(kBlock, count - at);
    const char* from = static_cast<const char*>(values) + at * size;
    downcast(master + at, n, dtype, rounded.data());
    if (std::memcmp(rounded.data(), from, static_cast<std::size_t>(n * size)) == 0) continue;
    any = true;
    upcast(from, dtype, n, wide.data());
    for (int64_t i = 0; i < n; ++i)
      if (std::memcmp(reinterpret_cast<const char*>(rounded.data()) + i * size, from + i * size,
                      static_cast<std::size_t>(size)) != 0)
        master[at + i] = wide[static_cast<std::size_t>(i)];
  }
  return any;
}

}  // namespace zr::host::update
