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
  /// A warning is logged if a wait() takes longer than `long_wait`, and again each time that has doubled. `tier` names
  /// the tier in it.
  TierHealth(std::string tier, std::chrono::milliseconds long_wait);
  ~TierHealth();
  TierHealth(const TierHealth&) = delete;

  /// Returns when the completion of a transfer is resolved. `what` names the data. Allocates nothing.
  void wait(zr_done* done, const std::string& what) ZR_EXCLUDES(mutex_);
  /// Throws as zr::host::check() does, and records the error, unless code is ZR_OK.
  void check(zr_code code, const zr_error& error, const std::string& plugin_call) ZR_EXCLUDES(mutex_);
  /// The error of the first failed transfer; empty if none failed.
  std::string failure() const ZR_EXCLUDES(mutex_);

 private:
  using Clock = std::chrono::steady_clock;
  // An element of a list, on the stack of the thread that waits.
  struct Wait {
    const std::string& what;
    Clock::time_point since;
    std::chrono::milliseconds next_warning;
    Wait* next;
  };
  void run_watchdog() ZR_EXCLUDES(mutex_);
  std::vector<std::string> warnings() ZR_REQUIRES(mutex_);

  const std::string tier_;
  const std::chrono::milliseconds long_wait_;
  mutable Mutex mutex_;
  ConditionVariable stopped_;
  bool stop_ ZR_GUARDED_BY(mutex_) = false;
  Wait* waits_ ZR_GUARDED_BY(mutex_) = nullptr;
  std::string failure_ ZR_GUARDED_BY(mutex_);
  std::thread watchdog_;
};

}  // namespace zr::host::offload
