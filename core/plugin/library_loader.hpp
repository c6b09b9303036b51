// The steps from a file to a module: reads tags without running code, loads, checks tables. Internal to core/plugin.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "plugin/abi_version.hpp"
#include "plugin/plugin.hpp"
#include "plugin/trust.hpp"
#include "zr/multiply_add.h"

namespace zr::host::plugin {

/// The data tags of a file, read before any of its code runs.
struct Tags {
  std::string rejection;  // "" if the file may be loaded
  Rejection cause;        // of the rejection
  AbiVersion needed;      // by the file's tag
  bool drafts = false;    // it uses draft headers, of this host's version
  std::vector<Role> roles;
  std::vector<std::pair<Role, std::string>> ids;  // of the components, if the file has tags for them
  bool several_hosts = false;                     // its communicators connect ranks on several hosts
  TrustedFile file;                               // the examined file; load_library() loads exactly this one
};
/// Checks trust and reads the data tags of a file.
Tags read_tags(const std::filesystem::path& file);

/// Loads an examined file, once per process; never unloads it. After probe_before_loading(), a child process loads it
/// first.
PluginValidation load_library(const std::filesystem::path& file, const Tags& tags);

/// What a loaded library shows of the flags that it was built with, which zr_add_plugin() would not use: symbols that
/// it exports in addition to its entry and tags; an optimizer with fused multiply-add. Runs code of the library.
std::vector<std::string> build_warnings(const PluginValidation& validation);
/// The warning about the exports of a file, or "".
std::string exports_warning(const std::filesystem::path& file);
/// The warning about a library whose zr_tag_multiply_add points to this function (or is null), or "". Calls it.
std::string multiply_add_warning(zr_multiply_add multiply_add);

/// The problem with a module's tables, or "".
std::string module_problem(const zr_module* module, const Tags& tags);

/// "an optimizer", "a strategy and an optimizer".
std::string with_articles(const std::vector<Role>& roles);

}  // namespace zr::host::plugin
