// Reads that do not return: what they wait for, and their limit.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

#include "zr/mutex.hpp"

namespace zr::host::checkpoint {

/// Watches the reads of one thread from another one, because a read from a file system that does not answer (a network
/// mount whose server is gone) cannot be interrupted. After 2 s within one read, logs file and position, once. After
/// ZR_READ_SECONDS (default 300) within one read, logs an error that names them and ends the process with code 3, by
/// exit_function().
class ReadWatch {
 public:
  /// Throws UserError if ZR_READ_SECONDS is not a number of seconds.
  ReadWatch();
  ReadWatch(const ReadWatch&) = delete;
  ~ReadWatch();

  /// A read in progress. One at a time.
  class Read {
   public:
    /// `path` must outlive it. `at`: the first byte.
    Read(ReadWatch& watch, const std::string& path, int64_t at) : watch_(watch) { watch_.set(&path, at); }
    Read(const Read&) = delete;
    ~Read() { watch_.set(nullptr, 0); }

   private:
    ReadWatch& watch_;
  };

 private:
  using Seconds = std::chrono::duration<double>;
  void set(const std::string* path, int64_t at);
  void watch();
  void report(const std::string& path, int64_t at, Seconds so_far);

  const Seconds limit_, period_;  // period_: between two looks at the read in progress
  bool has_warned_ = false, has_failed_ = false;  // used by thread_
  Mutex mutex_;
  ConditionVariable closed_;
  const std::string* path_ ZR_GUARDED_BY(mutex_) = nullptr;  // of the read in progress; null: none
  int64_t at_ ZR_GUARDED_BY(mutex_) = 0;
  int64_t looks_ ZR_GUARDED_BY(mutex_) = 0;  // at this read: a process that is stopped for a while does not look
  bool is_closing_ ZR_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace zr::host::checkpoint
