// Plug-ins: each loads, or does not, with the reason and the command that fixes it.
#pragma once

#include <string>
#include <vector>

#include "doctor/check.hpp"
#include "doctor/needs.hpp"
#include "plugin/plugin.hpp"

namespace zr::host::doctor {

/// A folder of the search path.
struct PluginFolder {
  std::string path;
  bool exists = true, readable = true;
};
/// A candidate file, and what the remedy for its rejection needs to know.
struct PluginFile {
  plugin::PluginValidation validation;
  bool needs_root = false;       // another user owns what the remedy changes
  std::string mount{};           // the mount point of the file
  std::string library_folder{};  // where a missing library is, if it is beside the plug-in
};
/// The search path and its files.
struct PluginFacts {
  std::vector<PluginFolder> folders{};
  std::vector<PluginFile> files{};
  std::string search_problem{};  // why ZR_PLUGIN_PATH cannot be used; "" if it can
  std::string variable{};        // the value of ZR_PLUGIN_PATH
  bool is_root = false;
  bool has_apt = false;  // this system installs packages with apt-get
};
/// Validates every file of the search path; plug-ins are loaded in a child process first (probe_before_loading()).
PluginFacts plugin_facts();
/// A line per folder with a problem, per plug-in that loads, and per file that does not.
Checks plugin_checks(const PluginFacts& facts, const JobNeeds& needs);

/// The command that makes a rejected plug-in load, or takes it out of the search path if nothing else helps; "" if its
/// author has to change it, or another version of Zeroth is needed.
std::string remedy_of(const PluginFile& file, const PluginFacts& facts);

}  // namespace zr::host::doctor
