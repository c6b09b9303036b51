// The plug-ins a file chooses, loaded, and with them the keys the file may hold.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "plugin/plugin.hpp"

namespace zr::host {

/// The keys that name a place for a part of the training state, and their values that are no tier.
inline constexpr std::array<const char*, 4> kTierKeys{"offload.optimizer", "offload.gradients", "offload.parameters",
                                                      "offload.activations"};
inline constexpr const char *kOnDevice = "device", *kAutomatic = "auto";

struct PluginSelection {
  Component strategy, optimizer;
  std::optional<Component> communicator;  // from two ranks on
  std::vector<Component> tiers;           // that [offload] names
  std::vector<ConfigKey> keys;            // of the loaded plug-ins
  PluginIds not_loaded;                   // plug-ins that were not loaded
};

/// Loads what the file names. One rank needs no communicator: one that the file does not mention is then not loaded,
/// one that it mentions is loaded for its keys alone. [control]
PluginSelection select_plugins(const Document& document, const Registry& registry, int64_t ranks);

/// A job judged: its configuration, complete, and its plug-ins, loaded.
struct ResolvedJob {
  JobConfig config;
  Component strategy, optimizer;
  std::optional<Component> communicator;  // needed from two ranks on
  std::vector<std::string> strategies;    // ids of all that there are
  std::vector<Component> tiers;           // that [offload] names, or lets auto fill, in this order
  std::vector<std::string> tier_ids;      // ids of all that there are
  std::string engine{};                   // name of the engine that runs it; empty: the job's unnamed one
};
/// Chooses and checks at once; `own`: the program's keys; world 0: job.ranks. [control]
ResolvedJob resolve_job(const Document& document, const Registry& registry, const std::vector<ConfigKey>& own,
                        int world, bool knows_all_keys = true);
/// The same job with more overrides laid over it. Throws Failure if they make no sense.
using Revalidate = std::function<ResolvedJob(const std::vector<std::string>& more, int world)>;

}  // namespace zr::host
