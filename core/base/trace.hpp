// The timeline of a rank, as a file that Perfetto opens (Chrome's trace events).
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>

#include "base/file.hpp"
#include "zr/mutex.hpp"

namespace zr::host {

/// Spans on named tracks of one rank. Thread-safe; a track's spans may overlap.
class Trace {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// Keeps spans in memory until open().
  explicit Trace(int rank);
  ~Trace();  // completes the file; logs a write error
  Trace(const Trace&) = delete;
  /// Writes all spans so far, and later ones, to the empty `file`. Call it once. Throws EnvironmentError.
  void open(File file) ZR_EXCLUDES(mutex_);
  /// Records a span from begin to end; the first span of a track creates it. Logs a write error and closes the file.
  void span(const std::string& track, const std::string& name, Time begin, Time end) ZR_EXCLUDES(mutex_);

 private:
  void flush_locked() ZR_REQUIRES(mutex_);
  const int rank_;
  Mutex mutex_;
  std::optional<File> file_ ZR_GUARDED_BY(mutex_);
  bool failed_ ZR_GUARDED_BY(mutex_) = false;  // the file could not be written: spans are dropped
  std::string text_ ZR_GUARDED_BY(mutex_);     // not written yet
  int64_t bytes_written_ ZR_GUARDED_BY(mutex_) = 0;
  std::map<std::string, int> tracks_ ZR_GUARDED_BY(mutex_);  // thread id in the file, by track
};

}  // namespace zr::host
