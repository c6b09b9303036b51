// The steps of one collective in the engine: validate, number, describe, count, submit to the plug-in or compose, wait.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/device_memory.hpp"
#include "base/error.hpp"
#include "base/trace.hpp"
#include "comm/collective_staging.hpp"
#include "comm/comm_volume.hpp"
#include "comm/enqueued_collectives.hpp"
#include "comm/open_communicator.hpp"
#include "control/control.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/communicator.h"
#include "zr/mutex.hpp"

namespace zr::host::comm {

/// Calls are [use] unless marked otherwise.
class Submission {
 public:
  static constexpr int64_t kStagingBytes = int64_t{4} << 20;  // for composed collectives
  /// Opens the plug-in for host memory if the world size is greater than 1.
  Submission(plugin::PluginHost& host, std::shared_ptr<control::Control> control, const plugin::Instance* instance,
             std::chrono::milliseconds timeout);
  ~Submission() { close(); }
  Submission(const Submission&) = delete;
  void close();  // idempotent
  /// From now on collectives may use memory of the device too, for which it opens the plug-in a second time. The device
  /// must outlive close().
  void open_on(DeviceMemory& device);
  /// Sets the function that the first composed collective calls to allocate kStagingBytes bytes.
  void set_staging_allocator(std::function<char*()> allocate) { allocate_staging_ = std::move(allocate); }

  int rank() const { return rank_; }
  int world() const { return world_; }
  zr_comm_ref ref();  // a reference for plug-ins
  /// Issues the collective and waits for it; throws Error. `control`: it is counted as control traffic.
  void run(const zr_coll& coll, bool control);
  /// Drives progress until `done` resolves; timeout_ns < 0: the limit given to the constructor. For a collective, an
  /// error is reported as that of submit(). For a completion that a plug-in made for itself, the code, the native code
  /// and the text of its resolution are returned unchanged, and neither an error nor a timeout fails the job.
  zr_code wait(zr_done* done, int64_t timeout_ns, zr_error* error);
  void abort();                       // [any]
  std::exception_ptr take_failure();  // see CommRuntime

  /// Called with every successful collective of a plug-in, on the thread that observed its completion. [any]
  /// `dst`: the address that was written, which differs from that in `coll` if the collective was staged. `number`:
  /// issued() after its submission.
  using CompletionObserver = std::function<void(const zr_coll& coll, const void* dst, int64_t number)>;
  void on_completed(CompletionObserver observer) { on_completed_ = std::move(observer); }
  /// Sets the flags that replace ZR_COLL_GRADIENTS and ZR_COLL_WEIGHTS of plug-ins' collectives.
  void set_inexact(uint32_t gradients, uint32_t weights) {
    gradients_ = gradients;
    weights_ = weights;
  }
  /// `staging` must outlive every collective; null: no staging.
  void set_collective_staging(CollectiveStaging* staging) { collective_staging_ = staging; }
  /// OpenCommunicator::shared_alloc(), within the time limit. Throws Error.
  std::pair<void*, const void*> shared_alloc(uint64_t bytes);
  /// Adds memory of which the ranks of a host have one copy: only it may be the dst of collectives with ZR_COLL_SHARED.
  void add_shared(const void* memory, int64_t bytes) {
    shared_.emplace_back(static_cast<const char*>(memory), static_cast<const char*>(memory) + bytes);
  }
  /// Call before the memory is freed.
  void remove_shared(const void* memory) {
    std::erase_if(shared_, [&](const auto& range) { return range.first == memory; });
  }
  void set_trace(Trace* trace) { trace_ = trace; }  // must outlive every collective; null: no trace
  /// Sets the call of the program that submits the following collectives; "" for none. Reports include it in the
  /// descriptions of collectives.
  void set_call(std::string call) { call_ = std::move(call); }
  const std::string& call() const { return call_; }

  /// The plug-in's communicators, for memory that peers can read; null in a world of one, and the second one without a
  /// device.
  OpenCommunicator* on_host() { return on_host_.get(); }
  OpenCommunicator* on_device() { return on_device_.get(); }
  CommVolumeCounter& counter() { return counter_; }
  const CommVolumeCounter& counter() const { return counter_; }
  /// Sets the number of completed steps, for reports.
  void set_step(int64_t step) {
    activity_.step = step;
    control_->set_activity(activity_);
  }
  int64_t submitted() const { return submitted_; }
  int64_t issued() const { return issued_; }

 private:
  struct Waiting;
  zr_code submit(const zr_coll& coll, zr_done* done, bool control, zr_error* error, bool in_stream = false);
  zr_code submit_of_plugin(const zr_coll& given, zr_stream* stream, zr_done* done, zr_error* error);
  bool may_be_shared(const zr_coll& coll) const;
  struct StagedCollective {  // a collective whose disk-backed addresses are replaced by memory
    zr_coll coll;
    uint64_t number;
    bool on_device;
  };
  zr_code stage(StagedCollective& staged, zr_error* error);
  void unstage(uint64_t number, bool succeeded) noexcept;
  zr_code enqueue(const zr_coll& coll, zr_error* error);
  void wait_for_device(const std::function<void()>& wait);
  zr_code issue(const zr_coll& coll, const StagedCollective& staged, zr_done* done, bool control, zr_error* error);
  zr_code issue_async(const zr_coll& coll, const StagedCollective& staged, zr_done* done, bool control,
                      zr_error* error);
  void set_on_resolved(const zr_coll& coll, const StagedCollective& staged, zr_done* done, bool observed);
  zr_code perform(const StagedCollective& staged, bool native, bool control, zr_error* error);
  zr_code progress(zr_error* error);  // of the plug-in; ZR_OK if it has no such function
  enum class WaitEnd { resolved, progress_failed, timeout, job_failed };
  WaitEnd drive_until_resolved(zr_done* done, std::chrono::nanoseconds limit, zr_code& code, zr_error* error);
  zr_code wait_for_own(zr_done* done, int64_t timeout_ns, zr_error* error);
  zr_code wait_for_collective(zr_done* done, int64_t timeout_ns, zr_error* error);
  std::chrono::nanoseconds limit_of(int64_t timeout_ns) const {  // of a wait
    return timeout_ns < 0 ? std::chrono::nanoseconds(timeout_) : std::chrono::nanoseconds(timeout_ns);
  }
  bool is_observed(bool control) const { return !control && (trace_ || on_completed_); }
  zr_code run_composed(const zr_coll& coll, bool control, zr_error* error);
  void run_single_rank(const zr_coll& coll, bool on_device);
  void run_on_device(const zr_coll& coll);
  zr_code finish(zr_code code, zr_error* error, const char* call = "submit");
  zr_code fail_job(const std::string& observation, zr_error* error);
  zr_code reject(zr_code code, int exit_code, const std::string& text, zr_error* error);
  std::unique_ptr<OpenCommunicator> open(const zr_device& device);  // of the plug-in
  void end_device();
  void run_watchdog(const std::stop_token& stop);
  std::string timeout_text() const;  // "5.0s"
  std::string call_text(const char* call) const;
  void notify_completed(const zr_coll& coll, const void* dst, int64_t number, Trace::Time begin);
  static zr_code abi_submit(void* self, const zr_coll* coll, zr_stream*, zr_done* done, zr_error* error) noexcept;
  static zr_code abi_progress(void* self, zr_error* error) noexcept;

  plugin::PluginHost& host_;
  std::shared_ptr<control::Control> control_;
  const plugin::Instance* instance_;
  const std::chrono::milliseconds timeout_;
  const int rank_, world_;
  std::vector<std::pair<const char*, const char*>> shared_;  // begin and end
  std::unique_ptr<OpenCommunicator> on_host_, on_device_;
  Mutex abort_mutex_;
  OpenCommunicator* to_abort_on_device_ ZR_GUARDED_BY(abort_mutex_) = nullptr;
  zr_comm_caps caps_{};
  std::function<char*()> allocate_staging_;
  char* staging_ = nullptr;

  control::Activity activity_;
  CommVolumeCounter counter_;
  DeviceMemory* device_ = nullptr;  // null: only host memory
  CompletionObserver on_completed_;
  CollectiveStaging* collective_staging_ = nullptr;
  std::deque<zr_done*> staged_completions_;  // completions of collectives that may still be staged, in submission order
  Trace* trace_ = nullptr;
  std::string call_;
  int64_t submitted_ = 0, issued_ = 0;
  uint32_t gradients_ = 0, weights_ = 0;  // see set_inexact()
  std::exception_ptr job_failure_;        // the failure of the job: every later call throws it
  std::exception_ptr failure_;            // for take_failure()

  // Watchdog: ends calls that exceed the time limit inside the plug-in.
  std::atomic<int64_t> waiting_since_{0};  // steady clock, ns; 0: no call waits
  std::atomic<bool> exceeded_timeout_{false};
  EnqueuedCollectives enqueued_;
  std::jthread watchdog_;
};

}  // namespace zr::host::comm
