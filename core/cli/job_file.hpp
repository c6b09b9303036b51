// A TOML file judged as its job would be: with the tables of the plug-ins it chooses and of the program it names.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "plugin/plugin.hpp"

namespace zr::host {

struct JobFile {
  std::string file;
  std::vector<std::string> overrides;
  std::filesystem::path program;          // "" if the file names none
  JobConfig config;                       // for job.ranks ranks
  std::vector<UncheckedValue> unchecked;  // values of keys that the program may have, where it was not asked
};

/// Throws Failure with everything that is wrong with the file. `bin` is where programs of the build or installation
/// are. Without `run` the program that the file names is not started, so the keys of its own stay unchecked.
JobFile validate_file(const std::string& file, const std::vector<std::string>& overrides, const Registry& registry,
                      const std::filesystem::path& bin, bool run = true);

/// Every effective value, its origin and meaning, aligned, by table.
std::string explain(const JobFile& job);

/// What `zeroth plugins` shows: accepted components with their keys, then what was refused and why.
std::string list_text(const std::vector<PluginValidation>& judged);

}  // namespace zr::host
