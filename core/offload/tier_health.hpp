// What is wrong with an open tier: its first failed transfer, and transfers that take very long.
#pragma once

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "comm/done.hpp"
#include "zr/mutex.hpp"

namespace zr::host::offload {

/// The health of one open tier. Any thread; it outlives the transfers of its tier.
class TierHealth {
 public:
  /// A warning is logged if a wait() or a Call takes longer than `long_wait`, and again each time that has doubled.
  /// `tier` names the tier in it.
  TierHealth(std::string tier, std::chrono::milliseconds long_wait);
  ~TierHealth();
  TierHealth(const TierHealth&) = delete;

  /// Returns when the completion of a transfer is resolved. `what` names the data. Allocates nothing.
  void wait(zr_done* done, const std::string& what) ZR_EXCLUDES(mutex_);
  /// Throws as zr::host::check() does, and records the error, unless code is ZR_OK.
  void check(zr_code code, const zr_error& error, const std::string& plugin_call) ZR_EXCLUDES(mutex_);
  /// The error of the first failed transfer; empty if none failed.
  std::string failure() const ZR_EXCLUDES(mutex_);

  /// Exists while a thread is in a function of the tier that transfers data, which may return only when the data is
  /// transferred, or waits for a completion.
  class Call {
   public:
    /// Both arguments outlive the call. Allocates nothing.
    Call(TierHealth& health, const std::string& what);
    ~Call();
    Call(const Call&) = delete;

   private:
    friend class TierHealth;
    TierHealth& health_;
    const std::string& what_;
    const std::chrono::steady_clock::time_point since_;
    std::chrono::milliseconds next_warning_;
    Call* next_ = nullptr;
  };

 private:
  void run_watchdog() ZR_EXCLUDES(mutex_);
  std::vector<std::string> warnings() ZR_REQUIRES(mutex_);

  const std::string tier_;
  const std::chrono::milliseconds long_wait_;
  mutable Mutex mutex_;
  ConditionVariable stopped_;
  bool stop_ ZR_GUARDED_BY(mutex_) = false;
  Call* calls_ ZR_GUARDED_BY(mutex_) = nullptr;  // in progress, the newest first
  std::string failure_ ZR_GUARDED_BY(mutex_);
  std::thread watchdog_;
};

}  // namespace zr::host::offload
