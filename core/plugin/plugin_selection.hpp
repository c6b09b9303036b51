// Loads the plug-ins that a file selects, and collects the keys that the file may contain.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "plugin/plugin.hpp"

namespace zr::host::plugin {

struct PluginSelection {
  Component strategy, optimizer;
  std::vector<Component> group_optimizers;           // others that [[optimizer.groups]] use
  std::optional<Component> communicator;             // from two ranks on
  std::vector<Component> tiers;                      // selected in [offload]
  std::vector<config::ConfigKey> keys;               // of the loaded plug-ins
  std::vector<config::UnselectedPlugin> unselected;  // loaded for their keys only: the file has a table for them
  config::PluginIds not_loaded;                      // ids that exist but were not loaded
  std::string communicator_choice;                   // see ResolvedJob
};

/// Loads the plug-ins that the file names. A single rank needs no communicator: it is loaded, for its keys only, if the
/// file names one. Other plug-ins that are not selected are loaded, for their keys only, if the file has a table for
/// them. communicator = "auto" of several ranks on a device becomes a library for the device, if there is one.
/// [control]
PluginSelection select_plugins(config::Document& document, const Registry& registry, int64_t ranks);

/// A validated job: its complete configuration and its loaded plug-ins.
struct ResolvedJob {
  config::JobConfig config;
  Component strategy, optimizer;
  std::vector<Component> group_optimizers;          // others that [[optimizer.groups]] use
  std::optional<Component> communicator;            // needed from two ranks on
  std::vector<std::string> strategies;              // ids of all strategies found
  std::vector<Component> tiers;                     // selected in [offload], directly or by auto, in this order
  std::vector<std::string> tier_ids;                // ids of all tiers found
  std::vector<config::UncheckedValue> unchecked{};  // values of unknown keys, if the program's keys are not known
  /// What communicator = "auto" means for several ranks on a device, and why; "" otherwise.
  std::string communicator_choice{};
  std::string engine{};  // name of the engine that runs it; empty: the job's unnamed one
};
/// Loads the plug-ins and validates the file. `program_keys`: the program's keys; world 0 means job.ranks. If
/// `knows_all_keys` is false, unknown keys are not rejected, but returned. [control]
ResolvedJob resolve_job(config::Document document, const Registry& registry,
                        const std::vector<config::ConfigKey>& program_keys, int world, bool knows_all_keys = true);
/// Resolves the same job with additional overrides. Throws Error if they are invalid.
using Revalidate = std::function<ResolvedJob(const std::vector<std::string>& extra_overrides, int world)>;

}  // namespace zr::host::plugin
