#include "config/foreign_keys.hpp"

#include <algorithm>
#include <cctype>
#include <sstream>

namespace zr::host::config {

namespace {

constexpr ForeignKey kForeignKeys[] = {
#include "plugins/foreign_keys.inc"
};

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

}  // namespace

std::span<const ForeignKey> foreign_keys() { return kForeignKeys; }

std::string_view foreign_remedy(std::string_view path) {
  const std::string whole = lower(path), name = whole.substr(whole.rfind('.') + 1);
  for (const ForeignKey& key : kForeignKeys) {
    std::istringstream names{std::string(key.names)};
    for (std::string one; names >> one;)
      if (one == name || one == whole) return key.remedy;
  }
  return "";
}

}  // namespace zr::host::config
