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
/// How an operation is performed: ranks send their elements to each other; or it is a sum that passes through few
/// ranks of each host, in rank order or not.
enum class SumWay { flat, ordered, per_host };

/// The way with the fewest bytes between the hosts of those that the operation permits. The same on all ranks. [any]
SumWay sum_way(const zr::CollectiveParts& parts, const Hosts& hosts);

}  // namespace mpi
