// Hexadecimal text, in lower case.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace zr::host {

inline constexpr std::string_view kHexDigits = "0123456789abcdef";

/// Two digits per byte.
inline std::string hex_of_bytes(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += {kHexDigits[byte >> 4], kHexDigits[byte & 15]};
  }
  return text;
}

/// 16 digits, the most significant first.
inline std::string hex(uint64_t value) {
  std::array<char, 8> bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(value >> (56 - 8 * i));
  return hex_of_bytes({bytes.data(), bytes.size()});
}

/// The bytes that hex_of_bytes() writes as `digits`; nullopt if there are none: an odd number of digits, or another
/// character, such as an upper-case digit.
inline std::optional<std::string> bytes_from_hex(std::string_view digits) {
  if (digits.size() % 2 || digits.find_first_not_of(kHexDigits) != digits.npos) return std::nullopt;
  std::string bytes;
  for (std::size_t i = 0; i < digits.size(); i += 2)
    bytes.push_back(static_cast<char>(kHexDigits.find(digits[i]) << 4 | kHexDigits.find(digits[i + 1])));
  return bytes;
}

/// The value that hex() writes as `digits`; nullopt if it is not 16 lower-case digits.
inline std::optional<uint64_t> value_from_hex(std::string_view digits) {
  const auto bytes = bytes_from_hex(digits);
  if (!bytes || bytes->size() != 8) return std::nullopt;
  uint64_t value = 0;
  for (const char byte : *bytes) value = value << 8 | static_cast<unsigned char>(byte);
  return value;
}

}  // namespace zr::host
