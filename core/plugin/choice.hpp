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

/// Loads what the file names. With one rank the communicator is not: its table is then not read. [control]
Choice choose(const Document& document, const Registry& registry, int64_t ranks);

}  // namespace zr::host
