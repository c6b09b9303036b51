// How a collective is performed: what decides it, also for plans.
#pragma once

#include <cstdint>

#include "hosts.hpp"
#include "sum_route.hpp"
#include "zr/collective_parts.hpp"

namespace mpi {

struct MpiOptions {
  bool hierarchy = true;              // collectives pass through few ranks of each host
  int64_t hierarchy_min_bytes = 0;    // those of fewer bytes do not
  int64_t staging_bytes = 4ll << 20;  // of the communicators of the hosts, as the key of "shm"
};

/// True if the ranks of each host have collectives of their own (LocalSteps). [any]
bool has_local_steps(const Hosts& hosts, const MpiOptions& options);

/// The way of a collective among ranks of `hosts`: the same on all ranks. Throws PluginError if it is quantized and the
/// ranks have no LocalSteps. [any]
Way way_of(const zr::CollectiveParts& parts, const Hosts& hosts, const MpiOptions& options);

}  // namespace mpi
