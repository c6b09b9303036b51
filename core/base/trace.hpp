// The timeline of a rank, as a file that Perfetto opens (Chrome's trace events).
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "base/file.hpp"

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
  void open(File file);
  /// Records a span from begin to end; the first span of a track creates it. Logs a write error and closes the file.
  void span(const std::string& track, const std::string& name, Time begin, Time end);

 private:
  void flush();
  std::mutex mutex_;
  std::optional<File> file_;
  bool failed_ = false;  // the file could not be written: spans are dropped
  std::string text_;     // not written yet
  int64_t at_ = 0;       // bytes written
  int rank_;
  std::map<std::string, int> tracks_;
};

}  // namespace zr::host
