#include "offload/tier_health.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "base/text.hpp"

namespace zr::host::offload {

TierHealth::TierHealth(std::string tier, std::chrono::milliseconds long_wait)
    : tier_(std::move(tier)), long_wait_(long_wait), watchdog_([this] { warn_of_long_waits(); }) {}

TierHealth::~TierHealth() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_one();
  watchdog_.join();
}

void TierHealth::wait(zr_done* done, const std::string& what) {
  if (done->code.load(std::memory_order_acquire) != ZR_AGAIN) return;
  std::list<Wait>::iterator own;
  {
    const MutexLock lock(mutex_);
    own = waits_.insert(waits_.end(), {what, Clock::now(), long_wait_});
  }
  done->code.wait(ZR_AGAIN);
  const MutexLock lock(mutex_);
  waits_.erase(own);
}

void TierHealth::check(zr_code code, const zr_error& error, const std::string& plugin_call) {
  try {
    host::check(code, error, plugin_call);
  } catch (const Error& failure) {
    const MutexLock lock(mutex_);
    if (failure_.empty()) failure_ = failure.what();
    throw;
  }
}

std::string TierHealth::failure() const {
  const MutexLock lock(mutex_);
  return failure_;
}

void TierHealth::warn_of_long_waits() {
  MutexLock lock(mutex_);
  const auto stop = [&]() ZR_REQUIRES(mutex_) { return stop_; };
  while (!stopped_.wait_for(lock, std::min(long_wait_, std::chrono::milliseconds(1000)), stop))
    for (Wait& wait : waits_) {
      if (Clock::now() - wait.since < wait.next_warning) continue;
      log(ZR_LOG_WARN,
          fmt::format("{}: {}: the transfer is not complete after {}, and this rank waits for it; look for errors of "
                      "the device in the system's log; if there are none, the plug-in did not resolve the completion",
                      tier_, wait.what, duration_text(std::chrono::duration<double>(wait.next_warning).count())));
      wait.next_warning *= 2;
    }
}

}  // namespace zr::host::offload
