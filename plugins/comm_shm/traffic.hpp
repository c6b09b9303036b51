// The bytes that the ranks of a job transfer in a collective, for plans.
#pragma once

#include "zr/abi/communicator_extensions.h"

namespace shm {

/// Adds the bytes of a collective, as rank 0 submits it, that all ranks read of each other's memory, and those of
/// results that they write to it. src and dst count as memory of mem_alloc(). Throws PluginError, and adds nothing
/// then. [any]
void add_traffic(const zr_coll& coll, zr_traffic& sum);

}  // namespace shm
