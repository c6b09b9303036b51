// A program that is run for its answer, within limits.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>

#include "cli/launch_process.hpp"

namespace zr::host {

/// Its stdout as the answer, its stderr, of which the last 64 KiB at least are kept. At the end it is killed with its
/// process group. One thread.
class BoundedRun {
 public:
  enum class End { completed, timed_out, output_too_long };
  /// Throws as start_process() does.
  BoundedRun(const ProcessOptions& options, std::size_t max_output);
  ~BoundedRun();
  BoundedRun(const BoundedRun&) = delete;

  /// A process that it started elsewhere may hold the pipes open: nothing is awaited from them once it has ended.
  End wait(double seconds);
  const std::string& out() const { return text_[0]; }
  const std::string& err() const { return text_[1]; }
  const ExitStatus& exit_status() const { return *exit_status_; }

 private:
  bool read_some(int milliseconds);

  const std::size_t max_output_;
  Process process_;
  std::array<int, 2> pipes_;
  std::array<std::string, 2> text_;
  std::optional<ExitStatus> exit_status_;
};

}  // namespace zr::host
