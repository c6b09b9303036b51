// Names and numbers as checkpoints hold them.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "checkpoint/safetensors.hpp"
#include "engine/loss_scale.hpp"
#include "zr/abi/base.h"

namespace zr::host {

/// "F32": as safetensors names a type.
inline std::string stored_name(zr_dtype dtype) {
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

/// The type that weights are rounded from and to; ZR_NONE: no such type.
inline zr_dtype float_of(const std::string& stored) {
  return stored == "F32" ? ZR_F32 : stored == "BF16" ? ZR_BF16 : stored == "F16" ? ZR_F16 : ZR_NONE;
}

/// Two digits a byte, of data[bytes].
inline std::string to_hex(const void* data, uint64_t bytes) {
  static const char* digits = "0123456789abcdef";
  std::string text;
  for (uint64_t i = 0; i < bytes; ++i) {
    const auto byte = static_cast<const unsigned char*>(data)[i];
    text += {digits[byte >> 4], digits[byte & 15]};
  }
  return text;
}

/// The bytes again.
inline std::string from_hex(const std::string& text) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16)));
  return bytes;
}

/// What a checkpoint holds besides tensors (core/checkpoint/FORMAT.md).
struct Facts {
  int64_t updates = 0, samples = 0, seed = 0;
  std::map<std::string, int64_t> parameter_steps;
  LossScale::Image loss_scale{};
  std::string optimizer;
  std::map<std::string, std::string> globals;  // of the optimizer, as bytes
};

}  // namespace zr::host
