// The identity of the libraries that this process has loaded, for comparison between ranks.
#pragma once

#include <cstdint>

#include "plugin/plugin.hpp"

namespace zr::host::plugin {

/// XXH3 (64 bits) of the component's file, computed when the library was loaded: a later change or removal of the file
/// does not affect it. Throws InternalError if this process did not load the library. Any thread.
uint64_t loaded_file_hash(const Component& component);

}  // namespace zr::host::plugin
