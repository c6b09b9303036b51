#include "config/key.hpp"

#include <fmt/format.h>

#include <cmath>

#include "base/text.hpp"
#include "config/value.hpp"

namespace zr::host::config {

const std::vector<std::string>& roles() {
  static const auto* names = new std::vector<std::string>{"strategy", "optimizer", "communicator"};
  return *names;  // never destroyed
}

namespace {
PathKind path_kind_by_name(const std::string& name) {
  const auto is = [&](const std::string& word) { return name == word || name.ends_with("_" + word); };
  return is("path") ? PathKind::list : is("library") ? PathKind::name_or_path : PathKind::none;
}
}  // namespace

std::vector<ConfigKey> keys_of(const zr_key* const* keys, uint32_t n, const std::string& table) {
  std::vector<ConfigKey> config_keys;
  for (uint32_t i = 0; i < n; ++i) {
    const zr_key& from = *keys[i];
    ConfigKey key{table,    from.name, from.type, from.def ? from.def : "", from.meaning ? from.meaning : "",
                  from.min, from.max};
    key.per_group = from.flags & ZR_KEY_PER_GROUP;
    if (key.type == ZR_KEY_STRING && !from.choices) key.path_kind = path_kind_by_name(key.name);
    for (std::string_view rest = from.choices ? from.choices : ""; !rest.empty();) {
      const auto bar = rest.find('|');
      key.choices.emplace_back(rest.substr(0, bar));
      rest = bar == rest.npos ? std::string_view() : rest.substr(bar + 1);
    }
    config_keys.push_back(std::move(key));
  }
  return config_keys;
}

std::string_view type_text(uint32_t type) {
  switch (type) {
    case ZR_KEY_BOOL: return "boolean";
    case ZR_KEY_INT: return "integer";
    case ZR_KEY_FLOAT: return "number";
    case ZR_KEY_STRING: return "string";
    case ZR_KEY_BYTES: return "size";
    case ZR_KEY_DURATION: return "duration";
    case ZR_KEY_FLOATS: return "numbers";
    case kPatterns: return "name patterns";
    default: return "";
  }
}

std::string_view type_text(const ConfigKey& key) {
  if (key.path_kind == PathKind::list) return "paths";
  return key.path_kind == PathKind::path || key.path_kind == PathKind::program ? "path" : type_text(key.type);
}

std::string range_text(const ConfigKey& key) {
  if (!key.choices.empty()) {
    std::string list;
    for (const auto& choice : key.choices) list += (list.empty() ? "" : "|") + choice;
    return list;
  }
  const auto bound = [&](double value) {
    if (key.type == ZR_KEY_BYTES) return bytes_text(static_cast<int64_t>(value));
    if (key.type == ZR_KEY_DURATION) return value >= 86400 ? shortest(value / 86400) + " d" : shortest(value) + " s";
    return shortest(value);
  };
  const bool low = std::isfinite(key.min), high = std::isfinite(key.max);
  if (low && high) return fmt::format("{} to {}", bound(key.min), bound(key.max));
  if (low) return "at least " + bound(key.min);
  return high ? "at most " + bound(key.max) : "";
}

std::string declaration_problem(const ConfigKey& key) {
  if (key.name.empty() || key.name.find_first_of(". \t\"'[]=#") != std::string::npos)
    return fmt::format("the key's name '{}' is not a bare TOML key", key.name);
  if (type_text(key.type).empty()) return fmt::format("the key '{}' has the unknown type {}", key.path(), key.type);
  if (key.meaning.empty() || key.meaning.find('\n') != std::string::npos)
    return fmt::format("the key '{}' needs a meaning of exactly one line", key.path());
  if (!(key.min <= key.max)) return fmt::format("the key '{}' has an empty range", key.path());
  if (key.def.empty() || key.def[0] == '@') return "";
  const std::string problem = default_value(key).problem;
  return problem.empty() ? "" : fmt::format("the default of key '{}': {}", key.path(), problem);
}

}  // namespace zr::host::config
