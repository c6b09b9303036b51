#include "connection.hpp"

#include <sched.h>
#include <time.h>

#include <cerrno>
#include <utility>

#include "signals_blocked.hpp"

namespace nccl {

namespace {

using std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr timespec kNap{0, 50000};
constexpr auto kJobInterval = std::chrono::milliseconds(200);  // between checks of whether the job has failed
constexpr auto kCloseLimit = std::chrono::seconds(5);
constexpr int64_t kWatchNs = 500'000'000;  // between checks for errors of NCCL

bool is_error(Result result) { return result != kSuccess && result != kInProgress; }

}  // namespace

void Wait::pause() {
  if (elapsed() < kSpin)
    ::sched_yield();
  else
    ::nanosleep(&kNap, nullptr);
}

Connection::Connection(const Functions& nccl, GpuDevice& device, const UniqueId& id, int rank, int world,
                       std::chrono::duration<double> limit, const std::function<void()>& require_job)
    : nccl_(nccl), device_(device) {
  ::sem_init(&wake_, 0, 0);
  try {
    Result result = kSuccess;
    device_.make_current([&] {
      const SignalsBlocked blocked;
      Config config;
      result = nccl_.comm_init_rank_config(&comm_, world, id, rank, &config);
    });
    connect(result, limit, require_job);
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { run_thread(); });
  } catch (...) {
    const SignalsBlocked blocked;
    if (comm_) nccl_.comm_abort(comm_);
    ::sem_destroy(&wake_);
    throw;
  }
}

Connection::~Connection() {
  ::sem_post(&wake_);
  thread_.join();
  close();
  ::sem_destroy(&wake_);
}

// Ranks of a node close their communicators together. A peer that does not come in time has failed.
void Connection::close() noexcept {
  if (!comm_) return;
  try {
    device_.make_current([&] {
      const SignalsBlocked blocked;
      if (!has_failed_)
        for (void* const handle : registered_) nccl_.comm_deregister(comm_, handle);
      Result result = has_failed_ ? kInvalidUsage : nccl_.comm_finalize(comm_);
      for (Wait waited; result == kInProgress && waited.elapsed() < kCloseLimit; result = state_of(comm_))
        waited.pause();
      result == kSuccess ? nccl_.comm_destroy(comm_) : nccl_.comm_abort(comm_);
    });
  } catch (const std::exception&) {  // the device has failed
  }
}

void Connection::abort() noexcept {
  *is_aborted_ = true;
  ::sem_post(&wake_);
}

// Waits for abort(), or the end, for a short time.
bool Connection::is_woken() noexcept {
  timespec end{};
  ::clock_gettime(CLOCK_MONOTONIC, &end);
  end.tv_nsec += kWatchNs;
  if (end.tv_nsec >= 1'000'000'000) {
    end.tv_nsec -= 1'000'000'000;
    ++end.tv_sec;
  }
  int result = 0;
  while ((result = ::sem_clockwait(&wake_, CLOCK_MONOTONIC, &end)) != 0 && errno == EINTR) {
  }
  return result == 0;
}

// An error while no operation is being issued: it ends what streams wait for, and the next call reports it.
void Connection::find_error() noexcept {
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!comm_ || has_failed_) return;
    const Result state = state_of(comm_);
    if (!is_error(state)) return;
    failure_ = text_of(state);
    has_failed_ = true;
    *is_aborted_ = true;
  } catch (const std::exception&) {  // no memory for the text: the next call of this function tries again
  }
}

// Returns without an abort if the connection is closed.
void Connection::run_thread() noexcept {
  device_.use_on_this_thread();
  while (!*is_aborted_ && !is_woken()) find_error();
  if (!*is_aborted_) return;
  Comm taken = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    taken = std::exchange(comm_, nullptr);
  }
  nccl_.comm_abort(taken);
}

void Connection::require_open(const std::string& what) const {
  if (!failure_.empty()) throw zr::PluginError(ZR_COMM, (what.empty() ? "" : what + ": ") + failure_);
  if (*is_aborted_ || !comm_) throw zr::PluginError(ZR_CANCELLED, "the communicator was aborted");
}

Result Connection::state_of(Comm comm) {
  Result state = kSuccess;
  const Result result = nccl_.comm_get_async_error(comm, &state);
  return result == kSuccess ? state : result;
}

std::string Connection::text_of(Result result) const {
  const char* const detail = comm_ ? nccl_.get_last_error(comm_) : nullptr;
  return std::string("NCCL: ") + nccl_.get_error_string(result) +
         (detail && *detail ? std::string(": ") + detail : "") +
         "; the environment variable NCCL_DEBUG=WARN makes NCCL print more";
}

void Connection::fail(Result result, const std::string& what) {
  has_failed_ = true;
  throw zr::PluginError(ZR_COMM, what + ": " + text_of(result), result);
}

// NCCL does not notice ranks that never connect, and notices only some of those that end meanwhile.
void Connection::connect(Result result, std::chrono::duration<double> limit, const std::function<void()>& require_job) {
  steady_clock::duration next_question = kJobInterval;
  for (Wait waited; result == kInProgress; result = state_of(comm_)) {
    waited.pause();
    if (waited.elapsed() >= next_question) {
      require_job();
      next_question = waited.elapsed() + kJobInterval;
    }
    if (waited.elapsed() < limit) continue;
    throw zr::PluginError(ZR_COMM,
                          "NCCL has not connected the ranks within communicator.nccl.connect_timeout; a rank has "
                          "ended, or the hosts cannot reach each other; the environment variable NCCL_DEBUG=INFO makes "
                          "NCCL print its progress, NCCL_SOCKET_IFNAME selects the network");
  }
  if (result != kSuccess) fail(result, "ncclCommInitRankConfig");
}

// Until the operations of a group are on their streams.
void Connection::wait(Result result, const std::string& what) {
  Wait waited;
  while (result == kInProgress) {
    waited.pause();
    const std::lock_guard<std::mutex> lock(mutex_);
    require_open(what);
    result = state_of(comm_);
    if (is_error(result)) fail(result, what);
  }
}

void Connection::register_memory(void* memory, int64_t bytes) {
  if (!nccl_.comm_register) return;
  device_.make_current([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    const SignalsBlocked blocked;
    require_open("the registration of memory");
    void* handle = nullptr;
    if (nccl_.comm_register(comm_, memory, static_cast<size_t>(bytes), &handle) == kSuccess && handle)
      registered_.push_back(handle);
  });
}

void Connection::group(const std::string& what, const std::function<Result(const Functions&, Comm)>& issue) {
  Result result = kSuccess;
  device_.make_current([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    const SignalsBlocked blocked;
    require_open(what);
    if (const Result state = state_of(comm_); state != kSuccess) fail(state, what);
    if (const Result started = nccl_.group_start(); started != kSuccess) fail(started, what);
    const Result issued = issue(nccl_, comm_);
    result = nccl_.group_end();
    if (is_error(issued)) fail(issued, what);
    if (is_error(result)) fail(result, what);
  });
  wait(result, what);
}

void Connection::check(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  require_open(what);
  if (const Result state = state_of(comm_); is_error(state)) fail(state, what);
}

}  // namespace nccl
