// The control plane: who the ranks are, a small key-value store, heartbeats, and the news that a rank is lost.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace zr::host {

/// What the training thread of a rank does now, for reports. Cheap to set; read by the heartbeat.
/// `sequence` counts the collectives that all ranks take part in, from 1, over all Engines of a process; sends and
/// receives keep the number of the collective before them and have fingerprint 0. Equal sequences of two ranks must
/// have equal fingerprints.
struct Activity {
  uint64_t sequence = 0;  // of the collective, 0 = none
  uint64_t fingerprint = 0;
  std::string what;  // "all_reduce 'gradient bucket 3' (fp32, 4194304)" or "computing"
  bool waiting = false;
  int64_t step = 0;
};

/// The store's key with which `rank` says "yes" while SIGTERM and SIGINT make it save and end by itself. A launcher
/// that reads it for every rank forwards such a signal and waits.
inline std::string saves_on_signal_key(int rank) { return "saves_on_signal/" + std::to_string(rank); }

/// One per process and job. All methods are thread-safe unless said otherwise.
class Control {
 public:
  /// Joins the job that the environment describes: zeroth launch (ZR_RANK, ZR_WORLD, ZR_LOCAL_RANK, ZR_LOCAL_WORLD,
  /// ZR_STORE=host:port, ZR_JOB, ZR_TOKEN), torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
  /// MASTER_PORT), mpirun (OMPI_COMM_WORLD_*, PMI_*), srun (SLURM_*). None of these, or one
  /// rank that another launcher started: one rank, no sockets. Without zeroth's launcher rank 0 hosts_store the store.
  /// Returns once every rank has joined. A process joins once: later calls return the same object, which lives until
  /// the process exits. Throws Failure(environment) naming variable and remedy, Failure(peer_lost) if a rank died
  /// before it joined.
  static std::shared_ptr<Control> join(std::chrono::milliseconds timeout = std::chrono::seconds(60));
  virtual ~Control() = default;

  virtual int rank() const = 0;
  virtual int world() const = 0;
  virtual int local_rank() const = 0;
  virtual int local_world() const = 0;
  virtual const std::string& job_id() const = 0;

  /// At most 1 MiB a value. A key put twice holds the later value.
  virtual void put(const std::string& key, const std::string& value) = 0;
  /// Waits until some rank has put the key; throws Failure(peer_lost) on timeout or when the job broke.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
  /// The store forgets the key, which every rank has read that will.
  virtual void drop(const std::string& key) = 0;

  /// The training thread's state; `what` is kept until the next call.
  virtual void set_activity(const Activity& activity) = 0;
  /// True once a rank is lost, the job mismatched, or was aborted. A relaxed atomic read: callable in spin loops.
  virtual bool broken() const = 0;
  /// The table of who died or hangs, and what each rank waited in; waits up to a second for the others' last words.
  /// Call after broken() or when a collective failed or outlasted its limit (`mine`: what this rank saw, then told to
  /// all): this breaks the job for all. A rank that does not call it within two seconds of a break is ended with exit
  /// code 4.
  virtual std::string report(const std::string& mine) = 0;
  /// The number of the next collective.
  uint64_t next_sequence() { return ++sequence_; }
  /// Called once, on the control thread, when the job breaks: unblock the communicator. Replaces the owner's earlier
  /// callback, an empty one removes it; returns after a running callback ended. If the job is broken already, the
  /// callback runs at once, on the control thread.
  virtual void on_broken(const void* owner, std::function<void()> callback) = 0;
  /// This rank leaves after `step` steps, in order or (`failed`) because of an exception: its silence is no loss, but a
  /// peer that waits for it is told. A later set_activity() (the process's next Engine) counts it in again. Leaving is
  /// implied by a process's exit() or return from main.
  virtual void leave(int64_t step, bool failed) = 0;

 private:
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace zr::host
