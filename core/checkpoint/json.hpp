// JSON from untrusted files: bounded depth, strictly checked numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace zr::host::checkpoint {

/// Maximal nesting depth. It is bounded because the functions that visit a value are recursive.
inline constexpr int kMaxJsonDepth = 64;

/// Whether the nesting depth of `text` is at most kMaxJsonDepth.
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

/// The first key that occurs twice in one object of the text, at any depth; nullopt if all keys are unique. If the text
/// is not valid JSON, only the part before the error is checked. Takes linear time, unlike nlohmann's parser with a
/// callback.
std::optional<std::string> repeated_key(const std::string& text);

/// Calls fn(key, value) for the members of the JSON object `text`, in their order, without holding the full object in
/// memory, because headers may have 100,000 members and more. Returns false if the text is not a JSON object, or is
/// nested deeper than kMaxJsonDepth; fn may have been called for members before the error. Sets `twice` to a key that
/// occurs twice in one object, at any depth; to nullopt if all keys are unique.
bool for_each_member(const std::string& text, std::optional<std::string>& twice,
                     const std::function<void(const std::string& key, const nlohmann::json& value)>& fn);

/// The value as a 64-bit integer; nothing if it is not an integer, out of range, or less than `minimum`.
inline std::optional<int64_t> json_integer(const nlohmann::json& value, int64_t minimum = 0) {
  if (value.is_number_unsigned()) {
    const auto n = value.get<uint64_t>();
    if (n > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return {};
    return static_cast<int64_t>(n) < minimum ? std::nullopt : std::optional(static_cast<int64_t>(n));
  }
  if (!value.is_number_integer() || value.get<int64_t>() < minimum) return {};
  return value.get<int64_t>();
}

/// The value as sizes of dimensions; nothing if it is not an array of non-negative integers.
inline std::optional<std::vector<int64_t>> shape_of(const nlohmann::json& value) {
  std::vector<int64_t> shape;
  if (!value.is_array()) return {};
  for (const nlohmann::json& size : value) {
    const auto n = json_integer(size);
    if (!n) return {};
    shape.push_back(*n);
  }
  return shape;
}

}  // namespace zr::host::checkpoint
