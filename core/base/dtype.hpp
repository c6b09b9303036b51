// Element types of the ABI: sizes and names.
#pragma once

#include <cstdint>
#include <string_view>

#include "zr/abi/base.h"

namespace zr::host {

/// Bytes of one element; 0 for ZR_NONE.
constexpr int64_t size_of(zr_dtype dtype) {
  switch (dtype) {
    case ZR_F32:
    case ZR_I32: return 4;
    case ZR_BF16:
    case ZR_F16: return 2;
    case ZR_F64:
    case ZR_I64: return 8;
    case ZR_I8:
    case ZR_U8: return 1;
    default: return 0;
  }
}

/// "fp32", "bf16", "fp16", "fp64", "int8", "uint8", "int32", "int64", "none".
constexpr std::string_view name_of(zr_dtype dtype) {
  switch (dtype) {
    case ZR_F32: return "fp32";
    case ZR_BF16: return "bf16";
    case ZR_F16: return "fp16";
    case ZR_F64: return "fp64";
    case ZR_I8: return "int8";
    case ZR_U8: return "uint8";
    case ZR_I32: return "int32";
    case ZR_I64: return "int64";
    default: return "none";
  }
}

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
