// Entries -> typed structs. Internal to core/config.
#pragma once

#include "config/config.hpp"

namespace zr::host::config {

/// One entry with a value of type T. InternalError if the key has another type, or a value that T does not have.
template <class T>
Setting<T> setting_of(const Entry& entry);

/// The structs of a configuration with all keys of the engine. InternalError if a key is missing.
HostConfig read_host_config(const JobConfig& config);

}  // namespace zr::host::config
