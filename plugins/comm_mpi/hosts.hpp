// Which ranks are on which machine.
#pragma once

#include <string>
#include <vector>

namespace mpi {

/// Identifies the host of this process: ranks on one host can read each other's memory, and have one network. Made of
/// the running kernel, the PID namespace, and the network namespace or, if it is set, ZR_HOST_ID. [any]
std::string host_identity();

/// The ranks of every host. Immutable.
class Hosts {
 public:
  Hosts() = default;
  /// identities: by rank; equal on ranks of one host.
  explicit Hosts(const std::vector<std::string>& identities);
  /// sizes: the ranks of each host, which are numbered host by host.
  explicit Hosts(const std::vector<int>& sizes);

  int count() const { return static_cast<int>(first_.size()) - 1; }
  /// Two ranks that are on one host, while a rank between them is on another one; "" if there are none: then all that
  /// follows is valid.
  const std::string& gap() const { return gap_; }
  int of(int rank) const { return host_[static_cast<std::size_t>(rank)]; }
  int first(int host) const { return first_[static_cast<std::size_t>(host)]; }  // rank; of count(): the number of ranks
  int size(int host) const { return first(host + 1) - first(host); }            // ranks
  /// The rank on `host` that works for a rank: itself on its own host. Ascending in `rank` on each host.
  int helper(int host, int rank) const {
    const int own = of(rank);
    return first(host) + (rank - first(own)) * size(host) / size(own);
  }
  /// True if there are several hosts, and several ranks on one of them.
  bool has_levels() const { return count() > 1 && (!gap_.empty() || count() < static_cast<int>(host_.size())); }

 private:
  std::vector<int> host_, first_{0};
  std::string gap_;
};

}  // namespace mpi
