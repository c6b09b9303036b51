// The wrapped communicator: sequence numbers, fingerprints, time limits, wire counts around a communicator plug-in.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/ledger.hpp"
#include "base/trace.hpp"
#include "comm/collective_staging.hpp"
#include "comm/comm_volume.hpp"
#include "control/control.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/communicator.h"
#include "zr/abi/communicator_extensions.h"

namespace zr::host {

/// One per Engine. Calls are [use]: any thread, one at a time (the caller serialises). A world of one needs no plug-in:
/// then collectives are local copies and folds. What the plug-in lacks is made of its all_gather (README.md).
class CommRuntime {
 public:
  struct Options {
    std::chrono::milliseconds timeout = std::chrono::minutes(5);
  };
  /// Opens the plug-in (collective over the job). `instance` may be null if world is 1.
  CommRuntime(PluginHost& host, std::shared_ptr<Control> control, const Instance* instance, Options options);
  ~CommRuntime();
  CommRuntime(const CommRuntime&) = delete;

  /// Of the host's own, for its control messages in a world of that size.
  static int64_t staging_bytes(int world);

  int rank() const;
  int world() const;
  /// Lent to plug-ins: submit goes through this wrapper. It fills size and fingerprint; a failure is told as a code,
  /// and as what take_failure() gives.
  zr_comm_ref ref() const;
  /// Issues one collective and waits. Fills size, fingerprint. Throws Failure(peer_lost) with the report if a peer is
  /// lost, stalls beyond the limit, or issued something else; after that every call throws the same. Failure(user) if
  /// the collective makes no sense.
  void run(zr_coll coll);
  /// The same, counted as control traffic.
  void run_control(zr_coll coll);
  void barrier(const char* label);
  /// Every rank's bytes, in rank order, equal length on all ranks. Control traffic.
  std::vector<std::string> all_gather_bytes(const std::string& mine, const char* label);
  /// root's bytes to all; length need not be known elsewhere. Control traffic.
  std::string broadcast_bytes(const std::string& mine, int root, const char* label);

  /// Memory peers can read in place (the plug-in's, or the host's own if it has none), zeroed, `align` at least 64.
  void* allocate(int64_t bytes, int64_t align, Tier tier, MemoryKind kind, const std::string& tag);
  void free(void* memory);
  /// One memory for all ranks of this host, of which `share` bytes count for this one: first where it is written, then
  /// where it is read only. For communicators that shared_weights_of() knows. Collective; free() takes the former.
  std::pair<void*, const void*> allocate_shared(int64_t bytes, int64_t share, Tier tier, MemoryKind kind,
                                                const std::string& tag);
  /// Lets wire counts leave out alignment padding of a planned buffer.
  void set_live(LiveRuns live);
  CommVolume volume() const;
  /// Steps made so far, for reports.
  void note_step(int64_t step);
  /// Collectives submitted so far with a done: what runs beside the caller, whether or not it had resolved at submit.
  int64_t submitted() const;
  /// Called with every collective of a plug-in's that ended well, on the thread that found it ended. `dst`: where its
  /// destination is in memory. Replaces the one before; empty: none. [use]
  void on_end(std::function<void(const zr_coll& coll, const void* dst)> ended);
  /// Collectives may be given addresses that stand for something else; it outlives them. Null: none are. [use]
  void set_collective_staging(CollectiveStaging* staging);
  /// Collectives of plug-ins become spans of it; it outlives them. Null: none.
  void set_trace(Trace* trace);
  /// What the program called, for the description of collectives: see CallScope. [use]
  void set_call(std::string call);
  const std::string& call() const;
  /// Unblocks every waiting call. [any]
  void abort();
  /// What a plug-in's call through ref() failed with, as the Failure it is on this side; null if nothing did. Clears
  /// it.
  std::exception_ptr take_failure();

  /// Waits for a completion while driving the plug-in's progress; timeout_ns < 0: the option's limit. For the async
  /// service.
  zr_code wait(zr_done* done, int64_t timeout_ns, zr_error* error);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// While it lives, reports name `call` ("engine.get(\"w\")") as the cause of the collectives that are issued.
class CallScope {
 public:
  CallScope(CommRuntime& comm, std::string call) : comm_(comm), before_(comm.call()) {
    comm_.set_call(std::move(call));
  }
  ~CallScope() { comm_.set_call(std::move(before_)); }
  CallScope(const CallScope&) = delete;

 private:
  CommRuntime& comm_;
  std::string before_;
};

/// What a communicator offers to ranks of one host; null if nothing.
const zr_shared_weights_api* shared_weights_of(const Component& communicator);

/// Offers "zr.host.async/1". Its waits drive the progress of the host's context "communicator", if there is one.
void offer_async(PluginHost& host);

}  // namespace zr::host
