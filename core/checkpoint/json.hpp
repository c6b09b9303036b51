// JSON that strangers wrote: bounded depth, numbers that are what they seem.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace zr::host {

/// Brackets in brackets, at most so many: what walks a value calls itself.
inline constexpr int kMaxJsonDepth = 64;

/// No deeper than that.
inline bool is_shallow(const std::string& text) {
  int depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') ++i;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxJsonDepth) return false;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return true;
}

/// The first key that an object of the text has twice, at any depth; nothing: none has. Of text that is not JSON only
/// the part before the error counts. Linear, which nlohmann's parser with a callback is not.
std::optional<std::string> repeated_key(const std::string& text);

/// Calls fn(key, value) for the members of the JSON object `text`, in their order, without holding the whole object in
/// memory: headers have 100,000 members and more. False: the text is not a JSON object, or deeper than kMaxJsonDepth;
/// fn may have been called for members before the error. `twice` is a key that an object has twice, at any depth;
/// nothing if none has.
bool each_member(const std::string& text, std::optional<std::string>& twice,
                 const std::function<void(const std::string& key, const nlohmann::json& value)>& fn);

/// A whole number of 64 bits from `least` on; nothing: it is none.
inline std::optional<int64_t> json_integer(const nlohmann::json& value, int64_t least = 0) {
  if (value.is_number_unsigned()) {
    const auto n = value.get<uint64_t>();
    if (n > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return {};
    return static_cast<int64_t>(n) < least ? std::nullopt : std::optional(static_cast<int64_t>(n));
  }
  if (!value.is_number_integer() || value.get<int64_t>() < least) return {};
  return value.get<int64_t>();
}

/// Sizes of dimensions; nothing: one of them is no size.
inline std::optional<std::vector<int64_t>> shape_of(const nlohmann::json& value) {
  std::vector<int64_t> shape;
  if (!value.is_array()) return {};
  for (const nlohmann::json& one : value) {
    const auto n = json_integer(one);
    if (!n) return {};
    shape.push_back(*n);
  }
  return shape;
}

}  // namespace zr::host
