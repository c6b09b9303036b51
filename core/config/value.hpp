// Validates one TOML value against its key. Internal to core/config.
#pragma once

#include <optional>
#include <string>

#include "config/config.hpp"

namespace zr::host::config {

/// A value of the key's type and range, or the problem ("expected an integer, found \"many\"").
struct ParsedValue {
  Value value;
  std::string written;  // as TOML text, with the unit the user wrote
  std::string problem;  // "" if valid
};

/// The key's default, which must exist and must not be a reference to another key.
ParsedValue default_value(const ConfigKey& key);
/// A TOML string in quotes, escaped.
std::string toml_quoted(const std::string& text);

}  // namespace zr::host::config
