// One TOML value judged by the key it stands at. Inside core/config.
#pragma once

#include <optional>
#include <string>

#include "config/config.hpp"

namespace zr::host {

/// A value of the key's type and range, or what is wrong with it ("expected an integer, found \"many\"").
struct ParsedValue {
  Value value;
  std::string written;  // as TOML text, with the unit the user wrote
  std::string problem;  // "" if sound
};

/// The key's default; the key must have one that is no reference.
ParsedValue default_value(const ConfigKey& key);
/// A TOML string in quotes, escaped.
std::string toml_quoted(const std::string& text);

}  // namespace zr::host
