// The contents of a Document, and the parsing of toml++ nodes. Internal to core/config: only this header includes
// toml++.
#pragma once

#include <toml++/toml.h>

#include <map>
#include <string>

#include "config/config.hpp"
#include "config/value.hpp"

namespace zr::host::config {

struct Document::Tree : Source {
  toml::table root;
  std::map<std::string, std::string> overrides;  // path -> text as written, for string keys
};

/// The origin of a node of the tree.
Origin origin_of(const toml::source_region& region);
/// The origin of a value; for a table that the command line created, the origin of its first value.
Origin node_origin(const toml::node& node);
/// The origin of a key: its own, or that of its value if toml++ has none (overrides of the command line).
Origin key_origin(const toml::key& key, const toml::node& node);
/// Parses `node` as a value of `key`. `raw`: the text of an override, or null; a string key takes the text unchanged.
ParsedValue parse_value(const ConfigKey& key, const toml::node& node, const std::string* raw);
/// A value as TOML text, shortened to about 200 bytes.
std::string source_text(const toml::node& node);
/// The node at "a.b.c", or null.
const toml::node* node_at(const toml::table& root, std::string_view path);

}  // namespace zr::host::config
