// The bytes that the ranks of several hosts transfer, as their communicator counts them without transferring any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "job/inexact_collectives.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/communicator.h"
#include "zr/abi/communicator_extensions.h"

namespace zr::host::job {

/// The number of ranks of each host. Ranks are numbered host by host.
using HostSizes = std::vector<int32_t>;

/// Bytes by all ranks together.
struct HostTraffic {
  std::string problem;                   // why the rest is not known; "": it is
  std::vector<uint64_t> sent, received;  // by host: to and from ranks of other hosts
  uint64_t inside = 0;                   // between ranks of one host
  uint64_t between() const;              // hosts
  uint64_t largest() const;              // that one host sends or receives
};

/// Adds up the traffic of collectives. One thread.
class TrafficCounter {
 public:
  /// `communicator` must outlive this object. `flags`: of the job's inexact collectives.
  TrafficCounter(const plugin::Instance& communicator, const HostSizes& hosts, const InexactCollectives& flags);
  /// Adds a collective as a strategy submits it on rank 0. Throws Error if the plug-in fails.
  void add(const zr_coll& coll);
  const HostTraffic& sum() const { return sum_; }

 private:
  const plugin::Instance& communicator_;
  const HostSizes hosts_;
  const InexactCollectives flags_;
  const zr_communicator_plan* api_;  // null: unknown
  const zr_comm_caps caps_;
  HostTraffic sum_;
};

}  // namespace zr::host::job
