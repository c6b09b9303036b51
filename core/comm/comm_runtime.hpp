// Wraps a communicator plug-in: adds sequence numbers, fingerprints, time limits and volume counters.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/device_memory.hpp"
#include "base/huge_page_memory.hpp"
#include "base/ledger.hpp"
#include "base/trace.hpp"
#include "comm/collective_staging.hpp"
#include "comm/comm_volume.hpp"
#include "comm/enqueued_collectives.hpp"
#include "control/control.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/communicator.h"
#include "zr/abi/communicator_extensions.h"
#include "zr/mutex.hpp"

namespace zr::host::comm {

class OpenCommunicator;

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

  int rank() const { return rank_; }
  int world() const { return world_; }
  /// A reference for plug-ins, whose submit goes through this wrapper. The wrapper fills size and fingerprint. A
  /// failure is returned as a code; take_failure() returns the exception.
  zr_comm_ref ref() const;
  /// Issues one collective and waits for it. Fills size and fingerprint. Throws PeerLostError with the failure
  /// report if a peer is lost, exceeds the time limit, or issued a different collective; after that every call throws
  /// the same failure. Throws UserError if the arguments are invalid.
  void run(zr_coll coll) { run(coll, false); }
  /// As run(), but counts the collective as control traffic.
  void run_control(zr_coll coll) { run(coll, true); }
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
  void set_planned_buffer(NonPaddingRanges buffer) { counter_.set_planned_buffer(std::move(buffer)); }
  CommVolume volume() const { return counter_.count(); }
  /// Sets the number of completed steps, for reports.
  void set_step(int64_t step) {
    activity_.step = step;
    control_->set_activity(activity_);
  }
  /// The number of collectives submitted so far with a completion, including those that were resolved during submit.
  int64_t submitted() const { return submitted_; }
  /// The number of all collectives issued so far.
  int64_t issued() const { return issued_; }
  /// Called with every successful collective of a plug-in, on the thread that observed its completion. [any]
  /// `dst`: the memory that contains its destination, which differs from that in `coll` if the collective was staged.
  /// `number`: issued() after its submission.
  using CompletionObserver = std::function<void(const zr_coll& coll, const void* dst, int64_t number)>;
  /// Registers a callback. Replaces the earlier callback; an empty callback removes it. [use]
  void on_completed(CompletionObserver observer) { on_completed_ = std::move(observer); }
  /// Sets the object that stages disk-backed addresses; it must outlive all collectives. Null: no staging. [use]
  void set_collective_staging(CollectiveStaging* staging) { staging_.set_staging(staging); }
  /// Records collectives of plug-ins as spans of `trace`, which must outlive all collectives. Null: no trace.
  void set_trace(Trace* trace) { trace_ = trace; }
  /// Sets the call of the program that the descriptions of collectives name, "" for none; see CallScope. [use]
  void set_call(std::string call) { call_ = std::move(call); }
  const std::string& call() const { return call_; }
  /// Unblocks every waiting call. [any]
  void abort();
  /// Returns and clears the Error of the last call that a plug-in made through ref(); null if it did not fail.
  std::exception_ptr take_failure() { return std::exchange(failure_, nullptr); }

  /// Waits for a completion and drives the plug-in's progress meanwhile. timeout_ns < 0: Options::timeout. For the
  /// async service. An error of a collective may fail the job, as that of its submission. For a completion that a
  /// plug-in made for itself, the code, the native code and the text of its resolution are returned unchanged, and
  /// neither an error nor a timeout fails the job.
  zr_code wait(zr_done* done, int64_t timeout_ns, zr_error* error);

 private:
  friend class CollectiveCall;  // one in progress
  struct Memory {
    int64_t bytes;
    Tier tier;
    MemoryKind kind;
    std::string tag;
    enum class From { host, plugin, shared_weights, device, device_plugin } from;
    HugePageMemory host_memory;  // set if the host allocated the memory
  };
  // During its lifetime, the activity shows that this rank waits, in which collective, and since when.
  struct Waiting {
    explicit Waiting(CommRuntime& comm);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    CommRuntime& comm;
  };
  enum class WaitEnd { resolved, progress_failed, timeout, job_failed };

  std::unique_ptr<OpenCommunicator> open(const zr_device& device);  // of the plug-in
  void close();
  void end_device();
  void run_watchdog(const std::stop_token& stop);
  void run(const zr_coll& coll, bool control);
  static zr_code abi_submit(void* self, const zr_coll* coll, zr_stream*, zr_done* done, zr_error* error) noexcept;
  static zr_code abi_progress(void* self, zr_error* error) noexcept;
  void notify_completed(const zr_coll& coll, const void* dst, int64_t number, Trace::Time begin);

  void* keep(void* memory, Memory properties);

  zr_code progress(zr_error* error);  // of the plug-in; ZR_OK if it has no such function
  WaitEnd drive_until_resolved(zr_done* done, int64_t timeout_ns, zr_code& code, zr_error* error);
  zr_code wait_for_own(zr_done* done, int64_t timeout_ns, zr_error* error);
  zr_code wait_for_collective(zr_done* done, int64_t timeout_ns, zr_error* error);
  void wait_for_device(const std::function<void()>& wait);
  zr_code finish(zr_code code, zr_error* error, const char* call = "submit");
  zr_code fail_job(const std::string& observation, zr_error* error);
  zr_code reject(zr_code code, int exit_code, const std::string& text, zr_error* error);
  std::string timeout_text() const;  // "5.0s"

  plugin::PluginHost& host_;
  std::shared_ptr<control::Control> control_;
  const plugin::Instance* instance_;
  const Options options_;
  const int rank_, world_;
  std::map<void*, Memory> memory_;
  // Memory of which the ranks of a host have one copy, begin and end: only it may be the dst of collectives with
  // ZR_COLL_SHARED.
  std::vector<std::pair<const char*, const char*>> shared_;
  // For memory that peers can read; null in a world of one, and the second one without a device.
  std::unique_ptr<OpenCommunicator> on_host_, on_device_;
  Mutex abort_mutex_;
  OpenCommunicator* to_abort_on_device_ ZR_GUARDED_BY(abort_mutex_) = nullptr;
  zr_comm_caps caps_{};
  char* message_staging_ = nullptr;  // buffer for the host's control messages
  char* compose_staging_ = nullptr;  // for composed collectives; the first one allocates it

  control::Activity activity_;
  CommVolumeCounter counter_;
  DeviceMemory* device_ = nullptr;  // null: only host memory
  CompletionObserver on_completed_;
  StagedCollectives staging_;
  Trace* trace_ = nullptr;
  std::string call_;
  int64_t submitted_ = 0, issued_ = 0;
  std::exception_ptr job_failure_;  // the failure of the job: every later call throws it
  std::exception_ptr failure_;      // for take_failure()

  // Watchdog: ends calls that exceed the time limit inside the plug-in.
  std::atomic<int64_t> waiting_since_{0};  // steady clock, ns; 0: no call waits
  std::atomic<bool> exceeded_timeout_{false};
  EnqueuedCollectives enqueued_;
  std::jthread watchdog_;
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
