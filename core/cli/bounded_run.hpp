// Runs a program for its output, within limits of time and size.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>

#include "cli/launch_process.hpp"

namespace zr::host::cli {

/// A program and its output: all of stdout, and at least the last 64 KiB of stderr. The destructor kills the program
/// and its process group. Not thread-safe.
class BoundedRun {
 public:
  enum class End { completed, timed_out, output_too_long };
  /// Starts the program. `max_output` is the limit for stdout in bytes. Throws like start_process().
  BoundedRun(const ProcessOptions& options, std::size_t max_output);
  ~BoundedRun();
  BoundedRun(const BoundedRun&) = delete;

  /// Waits until the program ends or exceeds a limit. Once it has ended, does not wait for more output, because a
  /// process that the program started may keep the pipes open. After 2 s, logs what it waits for: "FILE to report its
  /// keys".
  End wait(double seconds, const std::string& what);
  const std::string& out() const { return text_[0]; }
  const std::string& err() const { return text_[1]; }
  const control::ExitStatus& exit_status() const { return *exit_status_; }  // only after wait() returned End::completed

 private:
  bool read_some(int milliseconds);

  const std::size_t max_output_;
  Process process_;
  std::array<int, 2> pipes_;
  std::array<std::string, 2> text_;
  std::optional<control::ExitStatus> exit_status_;
};

}  // namespace zr::host::cli
