// The waits of CommRuntime, their time limit, and the failures that end them.
#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <tuple>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "comm/comm_runtime.hpp"
#include "comm/done.hpp"
#include "comm/open_communicator.hpp"

namespace zr::host::comm {

namespace {
using Clock = std::chrono::steady_clock;
constexpr auto kShortestOpenLimit = std::chrono::seconds(2);  // ranks do not start at the same time
constexpr auto kOpenGrace = std::chrono::seconds(2);          // for open() to fail after the job has failed
constexpr std::string_view kNotResolved = "the completion was not resolved within the timeout";

// The error codes after which the job cannot continue.
bool ends_job(zr_code code) {
  return code == ZR_COMM || code == ZR_TIMEOUT || code == ZR_CANCELLED || code == ZR_MISMATCH;
}

// Returns true if `stop` comes within `limit`.
bool stops_within(const std::stop_token& stop, std::chrono::milliseconds limit) {
  Mutex mutex;  // guards nothing: the condition variable only sleeps until the stop request
  std::condition_variable_any stopped;
  MutexLock lock(mutex);
  return stopped.wait_for(lock, stop, limit, [&] { return stop.stop_requested(); });
}
}  // namespace

CommRuntime::Waiting::Waiting(CommRuntime& c) : comm(c) {
  comm.activity_.waiting = true;
  comm.control_->set_activity(comm.activity_);
  comm.waiting_since_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
}

CommRuntime::Waiting::~Waiting() {
  comm.waiting_since_.store(0, std::memory_order_relaxed);
  comm.activity_.waiting = false;
  comm.activity_.what.clear();
  comm.control_->set_activity(comm.activity_);
}

// The plug-in's open() has no limit of its own, and cannot be aborted. If it exceeds communicator.timeout, the job
// fails, which the store's `get` reports to the plug-in. If the plug-in does not return even then, the process ends, in
// a program with zr::guarded.
std::unique_ptr<OpenCommunicator> CommRuntime::open(const zr_device& device) {
  const std::string outer = activity_.what;
  const std::string what = fmt::format("open of communicator '{}'", instance_->component().table->id);
  activity_.what = what;
  control_->set_activity(activity_);
  const std::jthread limit([this, what](const std::stop_token& stop) {
    if (stops_within(stop, std::max<std::chrono::milliseconds>(options_.timeout, kShortestOpenLimit))) return;
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

// The job has failed on this rank. The failure report goes into the Error that every later call throws.
zr_code CommRuntime::fail_job(const std::string& observation, zr_error* error) {
  if (!job_failure_) job_failure_ = std::make_exception_ptr(PeerLostError(control_->report(observation)));
  failure_ = job_failure_;
  return fill_error(error, ZR_COMM, observation);
}

zr_code CommRuntime::reject(zr_code code, int exit_code, const std::string& text, zr_error* error) {
  failure_ = error_with(exit_code, text);
  return fill_error(error, code, text);
}

std::string CommRuntime::timeout_text() const {
  return duration_text(std::chrono::duration<double>(options_.timeout).count());
}

// Converts the result of a function of the plug-in to an Error. activity_ still describes the collective.
zr_code CommRuntime::finish(zr_code code, zr_error* error, const char* call) {
  if (code == ZR_OK) return code;
  if (exceeded_timeout_)
    return fail_job(fmt::format("waited longer than communicator.timeout ({}){}", timeout_text(),
                                activity_.what.empty() ? "" : " in " + activity_.what),
                    error);
  std::string text = error ? plugin_text(*error) : "";
  if (text.empty()) text = fmt::format("error code {}", code);
  if (code == ZR_MISMATCH) return fail_job(text, error);
  const std::string what = activity_.what.empty() ? text : fmt::format("{}: {}", activity_.what, text);
  if (ends_job(code)) return fail_job(what, error);
  const int exit = code == ZR_INVALID                                            ? exit_code::user
                   : code == ZR_UNSUPPORTED || code == ZR_NOMEM || code == ZR_IO ? exit_code::environment
                                                                                 : exit_code::internal;
  // A world of one has no plug-in, but plug-ins may resolve completions with an error.
  return reject(code, exit, fmt::format("{}: {}", instance_ ? instance_->call_text(call) : call, what), error);
}

// Peers whose part in an earlier collective is missing may keep the device from what is waited for.
void CommRuntime::wait_for_device(const std::function<void()>& wait) {
  if (!on_device_) return wait();
  const std::string outer = activity_.what;
  activity_.what = "a wait for the device";
  {
    const Waiting waiting(*this);
    wait();
  }
  activity_.what = "a wait for the device";
  CallError error;
  zr_code code = on_device_->progress(&error);  // a collective may have failed while the device continues
  if (exceeded_timeout_ || control_->broken()) code = fill_error(&error, ZR_CANCELLED, "the job has failed");
  if (code != ZR_OK) {
    finish(code, &error);
    std::rethrow_exception(take_failure());
  }
  activity_.what = outer;
}

zr_code CommRuntime::progress(zr_error* error) { return on_host_ ? on_host_->progress(error) : zr_code{ZR_OK}; }

zr_code CommRuntime::wait(zr_done* done, int64_t timeout_ns, zr_error* error) {
  const zr_code code = done_poll(done, error);
  if (code == ZR_OK) return code;
  if (done->of_collective) return wait_for_collective(done, timeout_ns, error);
  failure_ = nullptr;  // of an earlier call, which this error has nothing to do with
  return code == ZR_AGAIN ? wait_for_own(done, timeout_ns, error) : code;
}

// Calls progress() until `done` is resolved or another event ends the wait. `code`: of the resolution, or of
// progress().
CommRuntime::WaitEnd CommRuntime::drive_until_resolved(zr_done* done, int64_t timeout_ns, zr_code& code,
                                                       zr_error* error) {
  const std::chrono::nanoseconds limit =
      timeout_ns < 0 ? std::chrono::nanoseconds(options_.timeout) : std::chrono::nanoseconds(timeout_ns);
  const auto start = Clock::now();
  const bool crowded = control_->local_world() > static_cast<int>(std::thread::hardware_concurrency());
  while ((code = done_poll(done, error)) == ZR_AGAIN) {
    code = progress(error);
    if (code != ZR_OK && code != ZR_AGAIN) return WaitEnd::progress_failed;
    if (done->code.load(std::memory_order_relaxed) != ZR_AGAIN) continue;
    const auto waited = Clock::now() - start;
    if (waited > limit) return WaitEnd::timeout;
    if (control_->broken()) return WaitEnd::job_failed;
    // Yields the core if there are more ranks than cores, or after a short wait; sleeps after a long wait.
    if (waited > std::chrono::milliseconds(1))
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    else if (crowded || waited > std::chrono::microseconds(50))
      ::sched_yield();
  }
  return WaitEnd::resolved;
}

zr_code CommRuntime::wait_for_collective(zr_done* done, int64_t timeout_ns, zr_error* error) {
  zr_code code = ZR_AGAIN;
  const std::pair issued(activity_.sequence, activity_.fingerprint);
  activity_.sequence = done->sequence ? done->sequence : activity_.sequence;
  activity_.fingerprint = done->sequence ? done->fingerprint : activity_.fingerprint;
  activity_.what = done->what;
  {
    const Waiting waiting(*this);
    const WaitEnd end = drive_until_resolved(done, timeout_ns, code, error);
    if (end == WaitEnd::timeout && timeout_ns >= 0) {
      code = fill_error(error, ZR_TIMEOUT, kNotResolved);
    } else {
      if (end == WaitEnd::timeout) exceeded_timeout_ = true;
      if (end == WaitEnd::timeout || end == WaitEnd::job_failed)
        code = fill_error(error, ZR_CANCELLED, "the job has failed");
      code = finish(code, error, end == WaitEnd::progress_failed ? "progress" : "submit");
    }
  }
  std::tie(activity_.sequence, activity_.fingerprint) = issued;
  return code;
}

// Without the watchdog, which would abort the communicator, and without `waiting`, which means in a collective.
zr_code CommRuntime::wait_for_own(zr_done* done, int64_t timeout_ns, zr_error* error) {
  const std::string outer = std::exchange(activity_.what, "waiting for a completion of a plug-in");
  control_->set_activity(activity_);
  zr_code code = ZR_AGAIN;
  const WaitEnd end = drive_until_resolved(done, timeout_ns, code, error);
  activity_.what = outer;
  control_->set_activity(activity_);
  if (end == WaitEnd::resolved) return code;
  if (end == WaitEnd::progress_failed) return finish(code, error, "progress");
  if (end == WaitEnd::job_failed) return fail_job("the job has failed", error);
  return fill_error(error, ZR_TIMEOUT,
                    timeout_ns >= 0 ? std::string(kNotResolved)
                                    : fmt::format("the completion was not resolved within communicator.timeout ({})",
                                                  timeout_text()));
}

// Waits while the collectives on the device can still complete; else their waits end.
void CommRuntime::end_device() {
  constexpr auto kLimit = std::chrono::seconds(10);
  const auto begin = Clock::now();
  while (enqueued_.age() > Clock::duration::zero() && !job_failure_ && !control_->broken() && !exceeded_timeout_ &&
         Clock::now() - begin < kLimit)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  if (enqueued_.age() > Clock::duration::zero()) abort();
}

void CommRuntime::run_watchdog(const std::stop_token& stop) {
  const auto timeout = options_.timeout;
  const auto tick = std::clamp(timeout / 10, std::chrono::milliseconds(5), std::chrono::milliseconds(500));
  while (!stops_within(stop, tick)) {
    const int64_t since = waiting_since_.load(std::memory_order_relaxed);
    const bool waits_too_long =
        since != 0 && Clock::now().time_since_epoch().count() - since >= std::chrono::nanoseconds(timeout).count();
    if (!waits_too_long && enqueued_.age() < timeout) continue;
    exceeded_timeout_ = true;
    abort();
    return;
  }
}

void CommRuntime::abort() {
  if (on_host_) on_host_->abort();
  const MutexLock lock(abort_mutex_);
  if (to_abort_on_device_) to_abort_on_device_->abort();
}

}  // namespace zr::host::comm
