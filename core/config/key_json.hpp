// Keys as JSON: a program reports the keys it reads to `zeroth`.
#pragma once

#include <string>
#include <vector>

#include "config/key.hpp"

namespace zr::host::config {

/// One line: {"zeroth_schema":1,"keys":[...]}.
std::string to_json(const std::vector<ConfigKey>& keys);
/// The keys in the last schema line of a program's output. Throws UserError naming `program` if the output has no such
/// line.
std::vector<ConfigKey> keys_from_json(const std::string& output, const std::string& program);

}  // namespace zr::host::config
