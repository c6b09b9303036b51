// The plug-in of Submission: opening and closing its communicators, and the watchdog for waits inside the plug-in.
#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>

#include "base/error.hpp"
#include "base/log.hpp"
#include "comm/done.hpp"
#include "comm/submission.hpp"
#include "zr/mutex.hpp"

namespace zr::host::comm {

namespace {
using Clock = std::chrono::steady_clock;
constexpr auto kShortestOpenLimit = std::chrono::seconds(2);  // ranks do not start at the same time
constexpr auto kOpenGrace = std::chrono::seconds(2);          // for open() to fail after the job has failed

// Returns true if `stop` comes within `limit`.
bool stops_within(const std::stop_token& stop, std::chrono::milliseconds limit) {
  Mutex mutex;  // guards nothing: the condition variable only sleeps until the stop request
  std::condition_variable_any stopped;
  MutexLock lock(mutex);
  return stopped.wait_for(lock, stop, limit, [&] { return stop.stop_requested(); });
}
}  // namespace

// The plug-in's open() has no limit of its own, and cannot be aborted. If it exceeds communicator.timeout, the job
// fails, which the store's `get` reports to the plug-in. If the plug-in does not return even then, the process ends, in
// a program with zr::guarded.
std::unique_ptr<OpenCommunicator> Submission::open(const zr_device& device) {
  const std::string outer = activity_.what;
  const std::string what = fmt::format("open of communicator '{}'", instance_->component().table->id);
  activity_.what = what;
  control_->set_activity(activity_);
  const std::jthread limit([this, what](const std::stop_token& stop) {
    if (stops_within(stop, std::max<std::chrono::milliseconds>(timeout_, kShortestOpenLimit))) return;
    const std::string report =
        control_->report(fmt::format("waited longer than communicator.timeout ({}) in {}", timeout_text(), what));
    const control::ExitFunction end = control::exit_function();
    if (stops_within(stop, kOpenGrace) || !end) return;
    log(ZR_LOG_ERROR, report);
    end(exit_code::peer_lost);
  });
  auto opened = std::make_unique<OpenCommunicator>(*instance_, rank_, world_, device);
  activity_.what = outer;
  control_->set_activity(activity_);
  return opened;
}

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
  on_host_ = open(kHostMemory);
  watchdog_ = std::jthread([this](const std::stop_token& stop) { run_watchdog(stop); });
  control_->on_broken(this, [this] { abort(); });
}

void Submission::open_on(DeviceMemory& device) {
  if (world_ > 1) {
    on_device_ = open(device.device());
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
  while (!stops_within(stop, tick)) {
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
