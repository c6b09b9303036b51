// One collective's way through the host: judged, numbered, described, counted, handed to the plug-in or composed,
// waited for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/failure.hpp"
#include "base/trace.hpp"
#include "comm/collective_staging.hpp"
#include "comm/comm_volume.hpp"
#include "control/control.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/communicator.h"
#include "zr/abi/communicator_extensions.h"

namespace zr::host {

/// Calls are [use] unless they say otherwise.
class Submission {
 public:
  static constexpr int64_t kStagingBytes = int64_t{4} << 20;  // for compositions
  /// Opens the plug-in if world is above 1.
  Submission(PluginHost& host, std::shared_ptr<Control> control, const Instance* instance,
             std::chrono::milliseconds timeout);
  ~Submission() { close(); }
  Submission(const Submission&) = delete;
  void close();  // may be called twice
  /// Where compositions get kStagingBytes bytes, at the first.
  void set_staging_allocator(std::function<char*()> allocate) { allocate_staging_ = std::move(allocate); }

  int rank() const { return rank_; }
  int world() const { return world_; }
  zr_comm_ref ref();  // to be lent to plug-ins
  /// Waits; throws Failure. `control`: counted as the host's own.
  void run(const zr_coll& coll, bool control);
  /// Drives progress until `done` resolves; timeout_ns < 0: the limit given at the start.
  zr_code wait(zr_done* done, int64_t timeout_ns, zr_error* error);
  void abort();                       // [any]
  std::exception_ptr take_failure();  // see CommRuntime

  /// Called with every collective of a plug-in's that ended well, on the thread that found it ended. [use]
  /// `dst`: where it was written, which is not where the caller asked for if that is paged.
  using Ended = std::function<void(const zr_coll& coll, const void* dst)>;
  void on_end(Ended ended) { ended_ = std::move(ended); }
  void set_collective_staging(CollectiveStaging* staging) {
    collective_staging_ = staging;
  }                                                 // outlives every collective; null: none
  void set_trace(Trace* trace) { trace_ = trace; }  // outlives every collective; null: none
  /// What the program called, in the course of which collectives are submitted from now on; "" if nothing. Part of
  /// their description in reports.
  void set_call(std::string call) { call_ = std::move(call); }
  const std::string& call() const { return call_; }

  /// Null if the host's own memory is as good.
  void* mem_alloc(uint64_t bytes, uint64_t align);
  void mem_free(void* memory);  // accepts null
  /// One memory for all ranks, as zr_shared_weights_api says; only where alias() is not null.
  const zr_shared_weights_api* alias() const;
  std::pair<void*, const void*> shared_alloc(uint64_t bytes);  // to write, to read; collective
  void shared_free(void* writer);                              // of this rank
  CommVolumeCounter& counter() { return counter_; }
  const CommVolumeCounter& counter() const { return counter_; }
  /// The rank has made `step` steps: for reports.
  void note_step(int64_t step) {
    activity_.step = step;
    control_->set_activity(activity_);
  }
  int64_t submitted() const { return submitted_; }

 private:
  struct Waiting;
  zr_code submit(const zr_coll& coll, zr_done* done, bool control, zr_error* error);
  struct StagedCollective {  // of a collective: memory for what it was given
    zr_coll coll;
    uint64_t number;
  };
  zr_code stage(StagedCollective& views, zr_error* error);
  void unstage(uint64_t number, bool well) noexcept;
  zr_code issue(const zr_coll& coll, const StagedCollective& views, zr_done* done, bool control, zr_error* error);
  zr_code composed(const zr_coll& coll, bool control, zr_error* error);
  void run_single_rank(const zr_coll& coll);
  bool is_native(const zr_coll& coll) const;
  zr_code finish(zr_code code, zr_error* error);
  zr_code fail_job(const std::string& mine, zr_error* error);
  zr_code reject(zr_code code, Exit exit, const std::string& text, zr_error* error);
  void watch(const std::stop_token& stop);
  void ended(const zr_coll& coll, const void* dst, Trace::Time begin);
  static zr_code abi_submit(void* self, const zr_coll* coll, zr_stream*, zr_done* done, zr_error* error) noexcept;
  static zr_code abi_progress(void* self, zr_error* error) noexcept;
  static zr_code abi_caps(void* self, zr_comm_caps* caps, zr_error*) noexcept;

  PluginHost& host_;
  std::shared_ptr<Control> control_;
  const Instance* instance_;
  const std::chrono::milliseconds timeout_;
  const int rank_, world_;
  const zr_communicator_api* api_ = nullptr;
  void* comm_ = nullptr;
  zr_comm_caps caps_{};
  std::function<char*()> allocate_staging_;
  char* staging_ = nullptr;

  Activity activity_;
  CommVolumeCounter counter_;
  Ended ended_;
  CollectiveStaging* collective_staging_ = nullptr;
  std::deque<zr_done*> staged_;  // of collectives that may not have left yet, in order
  Trace* trace_ = nullptr;
  std::string call_;
  int64_t submitted_ = 0;
  std::exception_ptr lost_;     // the job's end: every later call fails with it
  std::exception_ptr failure_;  // for take_failure()

  // Ends calls that wait too long inside the plug-in.
  std::atomic<int64_t> waiting_since_{0};  // steady clock, ns; 0: no call waits
  std::atomic<bool> too_long_{false};
  std::mutex watch_mutex_;
  std::condition_variable_any watch_end_;
  std::jthread watch_;
};

}  // namespace zr::host
