// One key a TOML file may hold. The host's, a plug-in's and a program's keys all have this shape.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "zr/abi/base.h"

namespace zr::host {

struct ConfigKey {
  std::string table;    // "train", "optimizer.<id>"; "" is the top level
  std::string name;     // "gradient_clipping"
  uint32_t type;        // ZR_KEY_*
  std::string def;      // default as TOML text; "@optimizer.lr": that key's value; "" means the key must be given
  std::string meaning;  // one line
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  std::vector<std::string> choices{};
  bool per_group = false;  // an optimizer's group may override it
  std::string path() const { return table.empty() ? name : table + "." + name; }
};

/// The host's own keys: job, train, data-independent parts only (core/config/README.md has the table).
const std::vector<ConfigKey>& host_keys();
/// A host key or one of its values that has another name since an earlier version.
struct RenamedKey {
  std::string_view path, old_value;  // old_value: "" if the key itself was renamed
  std::string_view now;
};
/// The new name of that key, or, if `value` is not "", of that value of it; "" if there was never such a one.
std::string_view renamed(std::string_view path, std::string_view value = {});
/// A component's schema as keys of table "<role>.<id>".
std::vector<ConfigKey> keys_of(const zr_key* const* keys, uint32_t n, const std::string& table);
/// The roles a plug-in is chosen for in TOML: "strategy", "optimizer", "communicator".
const std::vector<std::string>& roles();

/// "integer", "size", "duration": the type as a person reads it.
std::string_view type_text(uint32_t type);
/// "0 to 1", "at least 0", "fp32|bf16", "" if any value will do.
std::string range_text(const ConfigKey& key);
/// What is wrong with the key's own declaration (type, default outside its range), or "".
std::string declaration_problem(const ConfigKey& key);

}  // namespace zr::host
