// Hexadecimal text, in lower case.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace zr::host {

/// Two digits per byte.
inline std::string hex_of_bytes(std::string_view bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

/// 16 digits, the most significant first.
inline std::string hex(uint64_t value) {
  std::array<char, 8> bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(value >> (56 - 8 * i));
  return hex_of_bytes({bytes.data(), bytes.size()});
}

}  // namespace zr::host
