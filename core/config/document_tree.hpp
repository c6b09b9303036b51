// What a Document holds, and how toml++'s nodes are judged. Inside core/config: no other header includes toml++.
#pragma once

#include <toml++/toml.h>

#include <map>
#include <string>

#include "config/config.hpp"
#include "config/value.hpp"

namespace zr::host {

struct Document::Tree {
  toml::table root;
  std::string file;
  std::map<std::string, std::string> overrides;  // path -> the text as written, for keys that are strings
};

/// Where a node of the tree was written.
Origin origin_of(const toml::source_region& region);
/// The value at `node` for `key`. `raw`: the text of an override, or null; a string key takes it as it is.
ParsedValue parse_value(const ConfigKey& key, const toml::node& node, const std::string* raw);
/// A value as TOML text, in at most some 200 bytes.
std::string source_text(const toml::node& node);
/// The node at "a.b.c", or null.
const toml::node* node_at(const toml::table& root, std::string_view path);

}  // namespace zr::host
