// The tables of a file whose names are not declared keys: [[optimizer.groups]] and [checkpoint.rename]. Internal to
// core/config.
#pragma once

#include <vector>

#include "config/config.hpp"
#include "config/document_tree.hpp"
#include "config/problems.hpp"

namespace zr::host::config {

/// The groups in the order of the file. `keys`: all declared keys; `entries`: the values of the file outside groups.
std::vector<GroupConfig> read_groups(const toml::table& root, const std::vector<ConfigKey>& keys,
                                     const std::vector<Entry>& entries, Problems& problems);
/// The renames: exact names before patterns, longer patterns before shorter ones.
std::vector<Rename> read_renames(const toml::table& root, Problems& problems);

}  // namespace zr::host::config
