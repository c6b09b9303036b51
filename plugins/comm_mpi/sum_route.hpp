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
/// Of an all_reduce in rank order: the host of the ranks that need the sums, and pass them on. [any]
inline int owners_host(const Hosts& hosts) { return hosts.count() - 1; }

/// How an operation is performed: ranks send their elements to each other; a gather passes through one rank of each
/// host; or a sum passes through few ranks of each host, in rank order or not.
enum class Way { flat, gather, ordered, per_host };

/// Not for gathers: the way with the fewest bytes between the hosts of those that the operation permits. The same on
/// all ranks. [any]
Way sum_way(const zr::CollectiveParts& parts, const Hosts& hosts);

}  // namespace mpi
