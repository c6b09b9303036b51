// The control plane: rank identity, a small key-value store, heartbeats, and failure detection.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/process_exit.hpp"
#include "zr/rendezvous.hpp"

namespace zr::host::control {

/// The current activity of a rank's training thread, for reports. Cheap to set; heartbeats send it.
/// `sequence` counts the collectives in which all ranks take part, from 1, over all Engines of a process. Sends and
/// receives keep the number of the preceding collective and have fingerprint 0. If two ranks have the same sequence,
/// their fingerprints must be equal.
struct Activity {
  uint64_t sequence = 0;  // number of the collective; 0: no collective yet
  uint64_t fingerprint = 0;
  std::string what;  // "all_reduce 'gradient bucket 3' (fp32, 4194304)" or "computing"
  bool waiting = false;
  int64_t step = 0;
};

/// The store key that `rank` sets to "yes" while SIGTERM and SIGINT make the rank save a checkpoint and exit by itself.
/// If every rank has set it, the launcher forwards such a signal and waits.
inline std::string saves_on_signal_key(int rank) { return "saves_on_signal/" + std::to_string(rank); }

/// The store key that `rank` sets to "yes" beside saves_on_signal_key() if stop_requested() has the same effect as the
/// signal. If every rank has set it, the launcher does that instead: a signal would also reach a shell between the
/// launcher and the rank, which it ends.
inline std::string stops_on_request_key(int rank) { return "stops_on_request/" + std::to_string(rank); }

/// How this process ends if its training thread does not notice a failure of the job within 2 s, because it computes or
/// blocks; null: it continues, and the next call of the training thread fails.
using host::exit_function;
using host::ExitFunction;
using host::set_exit_function;

/// The store key that `rank` sets to "yes" when the job fails and no exit function is set: the program may catch the
/// failure and continue, for example to save its own state, and the launcher gives it time.
inline std::string continues_after_failure_key(int rank) { return "continues_after_failure/" + std::to_string(rank); }

/// One per process and job. All methods are thread-safe.
class Control {
 public:
  /// Joins the job that the environment describes: zeroth launch (ZR_RANK, ZR_WORLD, ZR_LOCAL_RANK, ZR_LOCAL_WORLD,
  /// ZR_STORE=host:port, ZR_JOB, ZR_TOKEN; on several hosts mpirun's variables and the last three), torchrun (RANK,
  /// WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), mpirun (OMPI_COMM_WORLD_*, PMI_*), srun
  /// (SLURM_*). If none of these variables is set, or another launcher started a single rank, the job has one rank and
  /// uses no sockets. Without zeroth's launcher, rank 0 hosts the store. Returns once every rank has joined. A process
  /// joins once: later calls return the same object, which lives until the process exits. Throws EnvironmentError that
  /// names variable and remedy, and PeerLostError if a rank died before it joined. `given` (or null): the job, if the
  /// program knows it; UserError if it is wrong, or the process is another rank already.
  static std::shared_ptr<Control> join(std::chrono::milliseconds timeout = std::chrono::seconds(60),
                                       const Rendezvous* given = nullptr);
  /// One rank, whatever the environment says: no sockets, no thread.
  static std::shared_ptr<Control> alone();
  virtual ~Control() = default;

  virtual int rank() const = 0;
  virtual int world() const = 0;
  virtual int local_rank() const = 0;
  virtual int local_world() const = 0;
  /// The host of each rank, by rank: hosts are numbered as ranks first name them. Ranks on one host can share memory
  /// and have one network (ZR_HOST_ID replaces the latter). By default all are on one.
  virtual std::vector<int> hosts() const { return std::vector<int>(static_cast<std::size_t>(world()), 0); }
  virtual const std::string& job_id() const = 0;

  /// A key has at most 4 KiB, a value at most 1 MiB. If a key is put twice, the later value replaces the earlier one.
  virtual void put(const std::string& key, const std::string& value) = 0;
  /// Waits until any rank has put the key; throws PeerLostError on timeout or when the job fails, or as
  /// set_silence_limit() says.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
  /// Removes the key and its value from the store. Call it only when no rank will read the key any more.
  virtual void drop(const std::string& key) = 0;

  /// Sets the training thread's activity, including `what`, until the next call.
  virtual void set_activity(const Activity& activity) = 0;
  /// True once the job has failed: a rank is lost, ranks issued different collectives, or a rank reported a failure. A
  /// relaxed atomic read, so it can be called in spin loops.
  virtual bool broken() const = 0;
  /// The signal whose effect the launcher requests: SIGTERM or SIGINT; 0: none.
  virtual int stop_requested() const { return 0; }
  /// Returns the failure report: a table of the ranks that died or hang, and of the collective in which each rank
  /// waited. The store collects the final status of the other ranks for up to 1 s. Call it after broken() becomes true,
  /// or when a collective failed or exceeded its time limit; `observation` says what this rank observed and is sent to
  /// all ranks. The call makes the job fail on all ranks. If a rank does not call it within 2 s after a failure, the
  /// control thread calls the function that set_exit_function() has set.
  virtual std::string report(const std::string& observation) = 0;
  /// Returns the number of the next collective and advances the counter.
  uint64_t next_sequence() { return ++sequence_; }
  /// Registers a callback that the control thread calls once when the job fails; it should unblock the communicator.
  /// Replaces the owner's earlier callback; an empty callback removes it. Returns after a running callback has ended.
  /// If the job has failed already, the control thread calls the callback immediately.
  virtual void on_broken(const void* owner, std::function<void()> callback) = 0;
  /// Removes this rank from the job after `step` steps: normally, or because of an exception (`failed`). After that,
  /// missing heartbeats of this rank are not a failure, but a peer that waits for it gets an error. A later
  /// set_activity() (by the next Engine of the process) makes the rank a participant again. A process that ends
  /// normally leaves too.
  virtual void leave(int64_t step, bool failed) = 0;
  /// get() makes the job fail if a rank, or the store, has sent nothing for this time: its process is stopped, or its
  /// host cannot be reached. At least 2 s; without this call, get() does not check it.
  virtual void set_silence_limit(std::chrono::milliseconds) {}

 private:
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace zr::host::control
