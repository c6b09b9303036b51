// Wraps a communicator plug-in: adds sequence numbers, fingerprints, time limits and volume counters.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/device_memory.hpp"
#include "base/ledger.hpp"
#include "base/trace.hpp"
#include "comm/collective_staging.hpp"
#include "comm/comm_volume.hpp"
#include "control/control.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/communicator.h"
#include "zr/abi/communicator_extensions.h"

namespace zr::host::comm {

/// One per Engine. Calls are [use]: any thread, one at a time (the caller serialises). A world of one needs no plug-in:
/// its collectives are local copies and reductions. Operations that the plug-in lacks are composed of its all_gather
/// (README.md).
class CommRuntime {
 public:
  struct Options {
    std::chrono::milliseconds timeout = std::chrono::minutes(5);
    /// The flags that replace ZR_COLL_GRADIENTS and ZR_COLL_WEIGHTS of plug-ins' collectives: ZR_COLL_INT8,
    /// ZR_COLL_INT4, ZR_COLL_ANY_ORDER. The communicator must accept them.
    uint32_t gradients = 0, weights = 0;
    /// The bytes that the plug-in plans for this world. They count if values are quantized, because the plug-in takes
    /// memory for them with the first ones.
    int64_t planned_bytes = 0;
  };
  /// Opens the plug-in (collective over the job). `instance` may be null if world is 1.
  CommRuntime(plugin::PluginHost& host, std::shared_ptr<control::Control> control, const plugin::Instance* instance,
              Options options);
  ~CommRuntime();
  CommRuntime(const CommRuntime&) = delete;

  /// Size of the staging buffer for the engine's control messages, for this world size.
  static int64_t staging_bytes(int world);

  int rank() const;
  int world() const;
  /// A reference for plug-ins, whose submit goes through this wrapper. The wrapper fills size and fingerprint. A
  /// failure is returned as a code; take_failure() returns the exception.
  zr_comm_ref ref() const;
  /// Issues one collective and waits for it. Fills size and fingerprint. Throws PeerLostError with the failure
  /// report if a peer is lost, exceeds the time limit, or issued a different collective; after that every call throws
  /// the same failure. Throws UserError if the arguments are invalid.
  void run(zr_coll coll);
  /// The same as run(), but counted as control traffic.
  void run_control(zr_coll coll);
  void barrier(const char* label);
  /// Every rank's bytes, in rank order, equal length on all ranks. Control traffic.
  std::vector<std::string> all_gather_bytes(const std::string& bytes, const char* label);
  /// Sends `bytes_of_root`, which only `root` needs to pass, to all ranks; the other ranks need not know the length.
  /// Control traffic.
  std::string broadcast_bytes(const std::string& bytes_of_root, int root, const char* label);

  /// Allocates zeroed memory that peers can read in place: from the plug-in, or from the engine if the plug-in has no
  /// allocator. The alignment is at least 64.
  void* allocate(int64_t bytes, int64_t align, Tier tier, MemoryKind kind, const std::string& tag);
  /// Opens the plug-in for memory of the device that the model's state is on, too; collective over the job. The device
  /// must outlive this object.
  void open_on(DeviceMemory& device);
  enum class Readers { peers, this_rank };
  /// Allocates zeroed memory of that device.
  void* allocate_on_device(int64_t bytes, MemoryKind kind, const std::string& tag, Readers readers = Readers::peers);
  void free(void* memory);
  /// Allocates one block that all ranks on this host share; the ledger of this rank counts `share` bytes. Returns the
  /// writable address and the read-only address. Only for communicators with shared_weights_of(). Collective. Pass the
  /// writable address to free().
  std::pair<void*, const void*> allocate_shared(int64_t bytes, int64_t share, Tier tier, MemoryKind kind,
                                                const std::string& tag);
  /// Makes the volume counters leave out the alignment padding of a planned buffer.
  void set_planned_buffer(NonPaddingRanges buffer);
  CommVolume volume() const;
  /// Sets the number of completed steps, for reports.
  void set_step(int64_t step);
  /// The number of collectives submitted so far with a completion, including those that were resolved during submit.
  int64_t submitted() const;
  /// The number of all collectives issued so far.
  int64_t issued() const;
  /// Registers a callback for every successful collective of a plug-in, called on the thread that observed its
  /// completion. `dst`: the memory that contains its destination. `number`: issued() after its submission. Replaces the
  /// earlier callback; an empty callback removes it. [use]
  void on_completed(std::function<void(const zr_coll& coll, const void* dst, int64_t number)> observer);
  /// Sets the object that stages disk-backed addresses; it must outlive all collectives. Null: no staging. [use]
  void set_collective_staging(CollectiveStaging* staging);
  /// Records collectives of plug-ins as spans of `trace`, which must outlive all collectives. Null: no trace.
  void set_trace(Trace* trace);
  /// Sets the call of the program that the descriptions of collectives name; see CallScope. [use]
  void set_call(std::string call);
  const std::string& call() const;
  /// Unblocks every waiting call. [any]
  void abort();
  /// Returns and clears the Error of the last call that a plug-in made through ref(); null if it did not fail.
  std::exception_ptr take_failure();

  /// Waits for a completion and drives the plug-in's progress meanwhile. timeout_ns < 0: Options::timeout. For the
  /// async service. An error of a collective may fail the job; that of a plug-in's own completion is only returned.
  zr_code wait(zr_done* done, int64_t timeout_ns, zr_error* error);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// During its lifetime, reports name `call` ("engine.get(\"w\")") as the call that issued the collectives.
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

/// The shared-weights extension of a communicator; null if the communicator does not have it.
const zr_shared_weights_api* shared_weights_of(const plugin::Component& communicator);

/// Why ranks on hosts with so many ranks, which are numbered host by host, cannot share memory with it, as a part of a
/// message; "": they can. Throws Error if the plug-in fails.
std::string sharing_obstacle(const plugin::Instance& communicator, const std::vector<int>& ranks_of_hosts);

/// The device types whose memory a communicator exchanges in the order of a stream, with the bits that it has in host
/// memory.
uint64_t stream_types_of(const plugin::Instance& communicator);

/// Offers "zr.host.async/1". A wait drives the progress of the host's context "communicator", if the host has one.
void offer_async(plugin::PluginHost& host);

}  // namespace zr::host::comm
