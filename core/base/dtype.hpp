// Element types of the ABI: sizes and names, from the table of the SDK.
#pragma once

#include <cstdint>
#include <string_view>

#include "zr/names.hpp"

namespace zr::host {

using zr::name_of;
using zr::size_of;

/// The dtype with that name among fp32, bf16 and fp16, the dtypes of weights and gradients; else ZR_NONE.
constexpr zr_dtype float_dtype_named(std::string_view name) {
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16})
    if (name == name_of(dtype)) return dtype;
  return ZR_NONE;
}

inline char* bytes_of(const zr_view& view) { return static_cast<char*>(view.data); }
/// Elements [first, first + count) of a view.
inline zr_view part_of(const zr_view& view, int64_t first, int64_t count) {
  zr_view part = view;
  part.data = bytes_of(view) + first * size_of(view.dtype);
  part.count = count;
  return part;
}

}  // namespace zr::host
