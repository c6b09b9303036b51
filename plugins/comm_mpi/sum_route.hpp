// The hosts through which a sum over ranks of several hosts passes.
#pragma once

#include "hosts.hpp"
#include "zr/collective_parts.hpp"

namespace mpi {

/// How a sum reaches the rank that needs it: it passes from host `first` to host `last`, the rank's own one included.
/// Ranks of the others send their elements to that rank.
struct SumRoute {
  int first, last;
  bool contains(int host) const { return host >= first && host <= last; }
};

/// For a rank on host `home`. The same on all ranks. [any]
SumRoute sum_route(const zr::CollectiveParts& parts, const Hosts& hosts, int home);
/// True if the operation is a sum that can pass so, and fewer bytes then pass between the hosts than if the ranks send
/// their elements to each other. The same on all ranks. [any]
bool saves_bytes(const zr::CollectiveParts& parts, const Hosts& hosts);

}  // namespace mpi
