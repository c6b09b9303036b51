#include "offload/tier_health.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "base/log.hpp"
#include "base/text.hpp"
#include "base/thread_without_signals.hpp"

namespace zr::host::offload {

TierHealth::TierHealth(std::string tier, std::chrono::milliseconds long_wait)
    : tier_(std::move(tier)), long_wait_(long_wait), watchdog_(thread_without_signals([this] { run_watchdog(); })) {}

TierHealth::~TierHealth() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_one();
  watchdog_.join();
}

TierHealth::Call::Call(TierHealth& health, const std::string& what)
    : health_(health), what_(what), since_(std::chrono::steady_clock::now()), next_warning_(health.long_wait_) {
  const MutexLock lock(health_.mutex_);
  next_ = std::exchange(health_.calls_, this);
}

TierHealth::Call::~Call() {
  const MutexLock lock(health_.mutex_);
  Call** at = &health_.calls_;
  while (*at != this) at = &(*at)->next_;
  *at = next_;
}

void TierHealth::wait(zr_done* done, const std::string& what) {
  if (done->code.load(std::memory_order_acquire) != ZR_AGAIN) return;
  const Call call(*this, what);
  done->code.wait(ZR_AGAIN);
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

std::vector<std::string> TierHealth::warnings() {
  std::vector<std::string> texts;
  for (Call* call = calls_; call; call = call->next_) {
    if (std::chrono::steady_clock::now() - call->since_ < call->next_warning_) continue;
    texts.push_back(fmt::format(
        "{}: {}: the transfer is not complete after {}, and this rank waits for it; look for errors of the disk in the "
        "system's log (dmesg); if there are none, and the tier is not just slow, its plug-in has a bug: stop the job",
        tier_, call->what_, duration_text(std::chrono::duration<double>(call->next_warning_).count())));
    call->next_warning_ *= 2;
  }
  return texts;
}

void TierHealth::run_watchdog() {
  const auto stop = [&]() ZR_REQUIRES(mutex_) { return stop_; };
  for (;;) {
    std::vector<std::string> texts;
    try {
      MutexLock lock(mutex_);
      if (stopped_.wait_for(lock, std::min(long_wait_, std::chrono::milliseconds(1000)), stop)) return;
      texts = warnings();
    } catch (const std::bad_alloc&) {  // it warns later
    }
    // Not with the mutex: standard error may block.
    for (const std::string& text : texts) log(ZR_LOG_WARN, text);
  }
}

}  // namespace zr::host::offload
