#include "conform/text.hpp"

#include <array>

#include "zr/abi/base.h"

namespace zr::conform {

std::string one_line(const std::string& text) {
  constexpr std::size_t kLongest = 300;
  std::string line;
  for (const char c : text.substr(0, kLongest)) line += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return text.size() > kLongest ? line + "..." : line;
}

std::string code_text(int32_t code) {
  static constexpr std::array<const char*, 12> kNames{"ZR_OK",       "ZR_INVALID", "ZR_UNSUPPORTED", "ZR_NOMEM",
                                                      "ZR_IO",       "ZR_COMM",    "ZR_TIMEOUT",     "ZR_CANCELLED",
                                                      "ZR_MISMATCH", "ZR_STATE",   "ZR_INTERNAL",    "ZR_AGAIN"};
  static_assert(kNames.size() == ZR_AGAIN + 1);
  if (code < 0 || code >= static_cast<int32_t>(kNames.size())) return concat("unknown code ", code);
  return concat(kNames[static_cast<std::size_t>(code)], " (", code, ")");
}

}  // namespace zr::conform
