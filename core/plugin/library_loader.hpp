// The steps from a file to a module: examined without running, loaded, its tables checked. Inside core/plugin.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "plugin/plugin.hpp"
#include "plugin/trust.hpp"

namespace zr::host {

inline constexpr Role kRoles[] = {Role::strategy, Role::communicator, Role::optimizer, Role::offload};

/// What a file says of itself before any of its code runs.
struct Tags {
  std::string rejection;  // "" if the file may be loaded
  std::vector<Role> roles;
  TrustedFile file;  // what was examined, and what is to be loaded
};
/// Reads its data tags.
Tags read_tags(const std::filesystem::path& file);

/// Loads an examined file, once per process; never unloads. After probe_before_loading() a child process does so first.
PluginValidation load_library(const std::filesystem::path& file, const Tags& tags);

/// What is wrong with a module's own tables, or "".
std::string module_problem(const zr_module* module, const Tags& tags);

/// "an optimizer", "a strategy and an optimizer".
std::string with_articles(const std::vector<Role>& roles);

}  // namespace zr::host
