#include "checkpoint/read_watch.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.hpp"
#include "base/process_exit.hpp"
#include "base/seconds_variable.hpp"
#include "base/text.hpp"
#include "base/thread_without_signals.hpp"
#include "zr/error.hpp"

namespace zr::host::checkpoint {

namespace {
constexpr double kSilence = 2;  // seconds; the longest wait without a word
}  // namespace

ReadWatch::ReadWatch()
    : limit_(seconds_of_variable("ZR_READ_SECONDS", 300)),
      period_(std::min(limit_, Seconds(0.2))),
      thread_(thread_without_signals([this] { watch(); })) {}

ReadWatch::~ReadWatch() {
  {
    const MutexLock lock(mutex_);
    is_closing_ = true;
  }
  closed_.notify_one();
  thread_.join();
}

void ReadWatch::set(const std::string* path, int64_t at) {
  const MutexLock lock(mutex_);
  path_ = path;
  at_ = at;
  looks_ = 0;
}

void ReadWatch::watch() {
  MutexLock lock(mutex_);
  while (!closed_.wait_for(lock, period_, [&]() ZR_REQUIRES(mutex_) { return is_closing_; }))
    if (path_) report(*path_, at_, static_cast<double>(++looks_) * period_);
}

// The caller holds the mutex, so that `path` stays.
void ReadWatch::report(const std::string& path, int64_t at, Seconds so_far) {
  const std::string limit = shortest(limit_.count());
  if (so_far >= limit_ && !has_failed_) {
    has_failed_ = true;
    log(ZR_LOG_ERROR, fmt::format("{}: reading at byte {} did not return within {} s: its file system does not answer; "
                                  "check the mount, or set the environment variable ZR_READ_SECONDS to more seconds",
                                  printable(path), at, limit));
    if (const ExitFunction end = exit_function()) end(exit_code::environment);
  }
  if (so_far.count() < kSilence || has_warned_) return;
  has_warned_ = true;
  log(ZR_LOG_INFO, fmt::format("waiting for {} to be read at byte {}, for at most {} s (ZR_READ_SECONDS)",
                               printable(path), at, limit));
}

}  // namespace zr::host::checkpoint
