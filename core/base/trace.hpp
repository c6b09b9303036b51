// What a rank did when, as a file that Perfetto opens (Chrome's trace events).
#pragma once

#include <chrono>
#include <fstream>
#include <map>
#include <mutex>
#include <string>

namespace zr::host {

/// Spans on named tracks of one rank. Thread-safe; a track's spans may overlap.
class Trace {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// Writes `path` anew; a file that cannot be written is a Failure(environment).
  Trace(const std::string& path, int rank);
  ~Trace();  // closes the list
  Trace(const Trace&) = delete;
  /// From begin to end; the track is made at its first span.
  void span(const std::string& track, const std::string& name, Time begin, Time end);

 private:
  std::mutex mutex_;
  std::ofstream file_;
  int rank_;
  std::map<std::string, int> tracks_;
};

}  // namespace zr::host
