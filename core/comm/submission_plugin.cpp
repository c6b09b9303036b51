// The plug-in of Submission: opening and closing its communicators, and the watchdog for waits inside the plug-in.
#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>

#include "comm/done.hpp"
#include "comm/submission.hpp"
#include "zr/mutex.hpp"

namespace zr::host::comm {

namespace {
using Clock = std::chrono::steady_clock;
}  // namespace

Submission::Submission(plugin::PluginHost& host, std::shared_ptr<control::Control> control,
                       const plugin::Instance* instance, std::chrono::milliseconds timeout)
    : host_(host),
      control_(std::move(control)),
      instance_(instance),
      timeout_(timeout),
      rank_(control_->rank()),
      world_(control_->world()),
      counter_(rank_, world_, std::ranges::max(control_->hosts()) + 1) {
  if (world_ == 1) return;
  if (!instance_) fail_internal(fmt::format("a communicator of {} ranks was created without a plug-in", world_));
  caps_ = communicator_caps(*instance_);
  on_host_ = std::make_unique<OpenCommunicator>(*instance_, rank_, world_, kHostMemory);
  watchdog_ = std::jthread([this](const std::stop_token& stop) { run_watchdog(stop); });
  control_->on_broken(this, [this] { abort(); });
}

void Submission::open_on(DeviceMemory& device) {
  if (world_ > 1) {
    on_device_ = std::make_unique<OpenCommunicator>(*instance_, rank_, world_, device.device());
    const MutexLock lock(abort_mutex_);
    to_abort_on_device_ = on_device_.get();
  }
  device_ = &device;
  device.watch_waits([this](const std::function<void()>& wait) { wait_for_device(wait); });
}

void Submission::close() {
  for (; !staged_completions_.empty(); staged_completions_.pop_front()) done_release(staged_completions_.front());
  if (DeviceMemory* const device = std::exchange(device_, nullptr)) device->watch_waits({});
  if (!on_host_) return;
  if (on_device_) end_device();
  control_->on_broken(this, {});
  watchdog_ = {};
  {
    const MutexLock lock(abort_mutex_);
    to_abort_on_device_ = nullptr;
  }
  on_device_.reset();
  enqueued_.clear();
  on_host_.reset();
}

// Waits while the collectives on the device can still complete; else their waits end.
void Submission::end_device() {
  constexpr auto kLimit = std::chrono::seconds(10);
  const auto begin = Clock::now();
  while (enqueued_.age() > Clock::duration::zero() && !job_failure_ && !control_->broken() && !exceeded_timeout_ &&
         Clock::now() - begin < kLimit)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  if (enqueued_.age() > Clock::duration::zero()) abort();
}

void Submission::run_watchdog(const std::stop_token& stop) {
  const auto tick = std::clamp(timeout_ / 10, std::chrono::milliseconds(5), std::chrono::milliseconds(500));
  Mutex mutex;  // guards nothing: the condition variable only sleeps until the stop request
  std::condition_variable_any stopped;
  MutexLock lock(mutex);
  while (!stopped.wait_for(lock, stop, tick, [&] { return stop.stop_requested(); })) {
    const int64_t since = waiting_since_.load(std::memory_order_relaxed);
    const bool waits_too_long =
        since != 0 && Clock::now().time_since_epoch().count() - since >= std::chrono::nanoseconds(timeout_).count();
    if (!waits_too_long && enqueued_.age() < timeout_) continue;
    exceeded_timeout_ = true;
    abort();
    return;
  }
}

void Submission::abort() {
  if (on_host_) on_host_->abort();
  const MutexLock lock(abort_mutex_);
  if (to_abort_on_device_) to_abort_on_device_->abort();
}

}  // namespace zr::host::comm
