// The collectives among the ranks of one host, which are parts of collectives over all hosts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <mutex>

#include "../comm_shm/kernel.hpp"
#include "../comm_shm/shm_communicator.hpp"
#include "zr/base.hpp"

namespace mpi {

/// Every rank of a host submits the same steps in the same order: those of a collective follow those of the one that
/// began before it. [MPI thread], except the constructor.
class LocalSteps {
 public:
  /// `communicator`: null if this rank is the only one of its host. `mutex`: held while the communicator is used. All
  /// arguments outlive the object.
  LocalSteps(const zr::Host& host, shm::ShmCommunicator* communicator, std::mutex& mutex)
      : host_(host), communicator_(communicator), mutex_(mutex) {}

  /// A collective begins; collectives begin in the order of their numbers.
  void begin(uint64_t collective) { open_.push_back(collective); }
  /// True if the collective may submit its next step.
  bool is_turn(uint64_t collective) const { return !open_.empty() && open_.front() == collective; }
  /// Starts a step, whose ranks are those of the host. Throws PluginError.
  zr::Done submit(const zr_coll& coll);
  /// The collective has submitted all of its steps.
  void end(uint64_t collective) { open_.erase(std::find(open_.begin(), open_.end(), collective)); }
  /// Advances the steps. Throws PluginError.
  void progress();

 private:
  void run_alone(const zr_coll& coll) const;

  const zr::Host& host_;
  shm::ShmCommunicator* const communicator_;
  const decltype(ZR_CHOOSE(reduce_ranks)) reduce_ = ZR_CHOOSE(reduce_ranks);
  std::mutex& mutex_;
  std::deque<uint64_t> open_;
};

}  // namespace mpi
