// Entries -> typed structs. Internal to core/config.
#pragma once

#include "config/config.hpp"

namespace zr::host::config {

/// The structs of a configuration with all keys of the engine. InternalError if a key is missing.
HostConfig read_host_config(const JobConfig& config);

}  // namespace zr::host::config
