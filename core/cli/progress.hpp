// A progress bar on stderr, on a terminal only.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "base/terminal.hpp"

namespace zr::host::cli {

/// A progress bar on one line, narrower than the terminal; nothing if stderr is not a terminal. The destructor clears
/// the line. Not thread-safe.
class Progress {
 public:
  explicit Progress(std::string action, int64_t total = 1)
      : action_(std::move(action)), total_(std::max<int64_t>(total, 1)) {}
  ~Progress() {
    if (percent_shown_ >= 0) std::fputs(std::string(kClearLine).c_str(), stderr);
  }
  Progress(const Progress&) = delete;
  /// Redraws the bar if the percentage done / total has changed. show(done) uses the `total` of the previous call, or
  /// of the constructor.
  void show(int64_t done, int64_t total) {
    total_ = std::max<int64_t>(total, 1);
    show(done);
  }
  void show(int64_t done) {
    const auto percent = static_cast<int>(static_cast<double>(done) / static_cast<double>(total_) * 100);
    if (!terminal_ || percent == percent_shown_) return;
    percent_shown_ = percent;
    const auto max_width = static_cast<std::size_t>(terminal_columns(STDERR_FILENO) - 1);
    std::string end = fmt::format(" {} {} %", progress_bar(percent / 100.0, 27), percent);
    if (end.size() > max_width) end = fmt::format(" {} %", percent);
    std::string line = truncated(action_, max_width - std::min(max_width, end.size())) + end;
    line.resize(std::min(line.size(), max_width));
    std::fputs((std::string(kClearLine) + line).c_str(), stderr);
  }

 private:
  std::string action_;
  int64_t total_;
  int percent_shown_ = -1;
  bool terminal_ = is_terminal(STDERR_FILENO);
};

}  // namespace zr::host::cli
