// The declaration of one key of a TOML file, the same for the engine, plug-ins and programs.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "zr/abi/base.h"

namespace zr::host::config {

/// The type of a key of the engine whose value is an array of strings, patterns of names. Not a type of the ABI:
/// plug-ins and programs cannot declare such keys.
inline constexpr uint32_t kPatterns = 1000;

/// Whether the value of a string key names files, and so has the rule of path_value.hpp.
enum class PathKind {
  none,
  path,          // one file or folder
  list,          // several, separated by ':'
  program,       // an executable; a name without '/' may also be in bin/ of the installation
  name_or_path,  // a file if the value has a '/' or begins with '~'; else a name, such as the id of a plug-in
};

struct ConfigKey {
  std::string table;    // "train", "optimizer.<id>"; "" is the top level
  std::string name;     // "gradient_clipping"
  uint32_t type;        // ZR_KEY_* or kPatterns
  std::string def;      // default as TOML text; "@optimizer.lr": the value of that key; "": the key is required
  std::string meaning;  // one line
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  std::vector<std::string> choices{};
  bool per_group = false;  // [[optimizer.groups]] may override it
  PathKind path_kind = PathKind::none;
  std::string path() const { return table.empty() ? name : table + "." + name; }
};

/// The engine's keys; `zeroth explain` prints them.
const std::vector<ConfigKey>& host_keys();
/// A component's schema as keys of table "<role>.<id>". The ABI has no type for paths, so names decide: a string
/// key `path` or `..._path` is a list of paths, one called `library` or `..._library` is a name or a path.
std::vector<ConfigKey> keys_of(const zr_key* const* keys, uint32_t n, const std::string& table);
/// The roles for which TOML selects a plug-in: "strategy", "optimizer", "communicator".
const std::vector<std::string>& roles();

/// The name of a type in messages: "integer", "size", "duration".
std::string_view type_text(uint32_t type);
/// The name of a key's type in messages: as of a type; "path" or "paths" for a string that names files.
std::string_view type_text(const ConfigKey& key);
/// "0 to 1", "at least 0", "fp32|bf16"; "" if every value is allowed.
std::string range_text(const ConfigKey& key);
/// The problem with the declaration of a key (for example a default outside its range), or "".
std::string declaration_problem(const ConfigKey& key);

}  // namespace zr::host::config
