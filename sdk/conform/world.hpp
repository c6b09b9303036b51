// The communicator of simulated ranks: threads of one process that share one queue of collectives.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "conform/reference_collective.hpp"
#include "conform/test_host.hpp"
#include "zr/abi/communicator.h"

namespace zr::conform {

class World {
 public:
  struct Options {
    int size = 2;
    bool lazy = false;  // a collective with a completion advances only in progress() and while a rank waits
    bool longer_structs = false;
    uint64_t fail_at = ~uint64_t{0};  // from this collective on, all fail with `code`
    zr_code code = ZR_COMM;
    const SimulatedDevice* device = nullptr;  // collectives are on the rank's stream of it; null: in host memory
  };
  /// Creates the communicator of all ranks.
  explicit World(const Options& options);
  World(const World&) = delete;

  /// The communicator of one rank; its completions belong to `host`.
  zr_comm_ref ref(int rank) const;
  /// Advances collectives until the completion is resolved; an error if the job has stopped.
  zr_code wait(Completion& completion);
  /// With a device: `work` runs on the rank's stream, on any thread, after the rank's collectives so far and before its
  /// later ones. It must not call this object; a Failure that it throws ends the job.
  void enqueue(int rank, std::function<void()> work);
  /// Waits until the rank's stream has done its work. Throws Failure if the job has ended.
  void synchronize(int rank);
  /// Forgets work that the rank has enqueued and its stream has not done.
  void forget(int rank);
  /// The rank issues no more collectives.
  void leave(int rank);
  /// Calls observer(number, collective) for each collective of a rank that has ended, on any thread; `number` counts
  /// the rank's collectives. Empty: no observer.
  using Observer = std::function<void(std::size_t number, const zr_coll& coll)>;
  void observe(int rank, Observer observer);
  /// Number of collectives that a rank has issued.
  std::size_t submitted(int rank) const;
  /// Ends the job with this problem, unless it has ended already.
  void stop(const std::string& problem);
  std::string problem() const;
  /// The collectives that a rank has issued: "reduce_scatter fp32 2048 'bucket 1'".
  std::vector<std::string> trace(int rank) const;

 private:
  struct Operation {
    std::vector<RankCollective> ranks;
    std::vector<Completion*> completions;
    int arrived = 0;
    bool performed = false;
  };
  struct Work {
    std::size_t after;  // number of collectives of the rank before it
    std::function<void()> run;
  };
  struct Port {
    World* world;
    int rank;
  };
  static zr_code submit(void* port, const zr_coll* coll, zr_stream* stream, zr_done* done, zr_error* error);
  static zr_code progress(void* port, zr_error* error);
  zr_code submit(int rank, const zr_coll& given, zr_done* done, zr_error* error);
  zr_code wait_for(int rank, std::size_t index, MutexLock& lock, zr_error* error) ZR_REQUIRES(mutex_);
  void advance() ZR_REQUIRES(mutex_);
  void work_before(std::size_t rank, std::size_t collective) ZR_REQUIRES(mutex_);
  std::string move_to_backing(zr_coll& coll) const;
  void stop_locked(const std::string& problem) ZR_REQUIRES(mutex_);
  std::string text_of(const RankCollective& collective) const;

  Options options_;
  Pages table_;
  std::vector<Port> ports_;
  mutable Mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Operation> operations_ ZR_GUARDED_BY(mutex_);
  std::size_t performed_ ZR_GUARDED_BY(mutex_) = 0;
  std::vector<std::size_t> submitted_ ZR_GUARDED_BY(mutex_);
  std::vector<Observer> observers_ ZR_GUARDED_BY(mutex_);  // by rank
  std::vector<bool> left_ ZR_GUARDED_BY(mutex_);
  std::vector<std::deque<Work>> work_ ZR_GUARDED_BY(mutex_);  // by rank
  std::vector<std::vector<std::string>> traces_ ZR_GUARDED_BY(mutex_);
  std::string problem_ ZR_GUARDED_BY(mutex_);
};

}  // namespace zr::conform
