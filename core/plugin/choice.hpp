// The plug-ins a file chooses, loaded, and with them the keys the file may hold.
#pragma once

#include <optional>
#include <vector>

#include "config/config.hpp"
#include "plugin/plugin.hpp"

namespace zr::host {

struct Choice {
  Component strategy, optimizer;
  std::optional<Component> communicator;  // from two ranks on
  std::vector<Key> keys;                  // of the loaded plug-ins
  PluginIds unread;                       // plug-ins that were not loaded
};

/// Loads what the file names. One rank needs no communicator: one that the file does not mention is then not loaded,
/// one that it mentions is loaded for its keys alone. [control]
Choice choose(const Document& document, const Registry& registry, int64_t ranks);

}  // namespace zr::host
