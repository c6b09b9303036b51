// A progress bar on stderr, on a terminal only.
#pragma once

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
  explicit Progress(std::string what, int64_t all = 1) : what_(std::move(what)), all_(std::max<int64_t>(all, 1)) {}
  ~Progress() {
    if (shown_ >= 0) std::fputs(std::string(kClearLine).c_str(), stderr);
  }
  Progress(const Progress&) = delete;
  /// Redraws the bar if the percentage done / all has changed. at(done) uses the `all` of the previous call, or of the
  /// constructor.
  void at(int64_t done, int64_t all) {
    all_ = std::max<int64_t>(all, 1);
    at(done);
  }
  void at(int64_t done) {
    const auto percent = static_cast<int>(static_cast<double>(done) / static_cast<double>(all_) * 100);
    if (!terminal_ || percent == shown_) return;
    shown_ = percent;
    const auto most = static_cast<std::size_t>(terminal_columns(STDERR_FILENO) - 1);
    std::string end = " " + progress_bar(percent / 100.0, 27) + " " + std::to_string(percent) + " %";
    if (end.size() > most) end = " " + std::to_string(percent) + " %";
    std::string line = cut_to(what_, most - std::min(most, end.size())) + end;
    line.resize(std::min(line.size(), most));
    std::fputs((std::string(kClearLine) + line).c_str(), stderr);
  }

 private:
  std::string what_;
  int64_t all_;
  int shown_ = -1;
  bool terminal_ = is_terminal(STDERR_FILENO);
};

}  // namespace zr::host::cli
