// The bytes that the ranks of a job transfer in a collective, for plans.
#pragma once

#include "way.hpp"
#include "zr/abi/communicator_extensions.h"

namespace mpi {

/// Adds the bytes of a collective, as rank 0 submits it, that all ranks send in messages of MPI or read of each other's
/// memory (docs/communicators.md). Throws PluginError, and adds nothing then. Linear in the number of ranks. [any]
void add_traffic(const zr_coll& coll, const MpiOptions& options, zr_traffic& sum);

}  // namespace mpi
