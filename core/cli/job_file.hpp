// Validates a TOML file as the job would: with the keys of the plug-ins and of the program that the file names.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "plugin/plugin.hpp"

namespace zr::host::cli {

struct JobFile {
  std::string file;
  std::vector<std::string> overrides;
  std::filesystem::path program;                  // "" if the file names no program
  bool keys_known = true;                         // false: the program was not started, so its keys are not known
  config::JobConfig config;                       // for job.ranks ranks
  std::vector<config::UncheckedValue> unchecked;  // if the program was not started: values of keys that it may have
};

/// Validates the file. Throws Error with all errors that it finds. `bin` is the folder of the programs of the build or
/// installation. If `run` is false, the program that the file names is not started, and its own keys are not checked.
JobFile validate_file(const std::string& file, const std::vector<std::string>& overrides,
                      const plugin::Registry& registry, const std::filesystem::path& bin, bool run = true);

/// The text of `zeroth explain`: every effective value, its origin and its meaning, in aligned columns, by table.
std::string explain(const JobFile& job);
/// A heading and one row per value, for keys that were not checked because the program was not started; "" for none.
std::string unchecked_text(const std::vector<config::UncheckedValue>& unchecked);

/// The keys of all plug-ins that the registry accepts, each once. Loads them.
std::vector<config::ConfigKey> plugin_keys(const plugin::Registry& registry);

/// Plug-in files for the memory of a type of device ("cuda").
struct DevicePlugins {
  std::string device;
  std::vector<plugin::PluginValidation> validations;
};
/// The text of `zeroth plugins`: accepted components with their keys, then rejected files with the reason. A component
/// with a file for a device too has one row; one that exists only for devices has a row that says so.
std::string list_text(const std::vector<plugin::PluginValidation>& validations,
                      const std::vector<DevicePlugins>& of_devices = {});

}  // namespace zr::host::cli
