// Conversion between dtypes and their names in safetensors files.
#pragma once

#include <string>

#include "checkpoint/safetensors.hpp"
#include "zr/abi/base.h"

namespace zr::host {

/// The name of a dtype in safetensors files: "F32".
inline std::string safetensors_name(zr_dtype dtype) {
  switch (dtype) {
    case ZR_BF16: return "BF16";
    case ZR_F16: return "F16";
    case ZR_F64: return "F64";
    case ZR_I8: return "I8";
    case ZR_U8: return "U8";
    case ZR_I32: return "I32";
    case ZR_I64: return "I64";
    default: return "F32";
  }
}

/// The dtype with this name if weights can have it (fp32, bf16, fp16); otherwise ZR_NONE.
inline zr_dtype safetensors_float(const std::string& stored) {
  return stored == "F32" ? ZR_F32 : stored == "BF16" ? ZR_BF16 : stored == "F16" ? ZR_F16 : ZR_NONE;
}

}  // namespace zr::host
