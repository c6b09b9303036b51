// What a rank did when, as a file that Perfetto opens (Chrome's trace events).
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
  ~Trace();  // closes the list; a file that cannot be written then is logged
  Trace(const Trace&) = delete;
  /// Writes the spans so far, and later ones, to `file`, which is empty. Once. Throws Failure(environment).
  void open(File file);
  /// From begin to end; the track is made at its first span. A file that cannot be written is logged, and closed.
  void span(const std::string& track, const std::string& name, Time begin, Time end);

 private:
  void flush();
  std::mutex mutex_;
  std::optional<File> file_;
  bool failed_ = false;  // the file could not be written: spans are dropped
  std::string text_;     // not yet in the file
  int64_t at_ = 0;       // bytes in the file
  int rank_;
  std::map<std::string, int> tracks_;
};

}  // namespace zr::host
