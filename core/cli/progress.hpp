// A progress bar on stderr, on a terminal only.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

namespace zr::host {

/// The destructor clears the line. Not thread-safe.
class Progress {
 public:
  explicit Progress(std::string what, int64_t all = 1) : what_(std::move(what)), all_(std::max<int64_t>(all, 1)) {}
  ~Progress() {
    if (shown_ >= 0) std::fputs("\r\033[K", stderr);
  }
  Progress(const Progress&) = delete;
  /// Shows that `done` of `all` is done. Without `all`: of the last value, first that of the constructor.
  void at(int64_t done, int64_t all) {
    all_ = std::max<int64_t>(all, 1);
    at(done);
  }
  void at(int64_t done) {
    const auto percent = static_cast<int>(done * 100 / all_);
    if (!terminal_ || percent == shown_) return;
    shown_ = percent;
    const std::string bar(static_cast<std::size_t>(percent / 4), '#');
    std::fprintf(stderr, "\r%s [%-25s] %d %%", what_.c_str(), bar.c_str(), percent);
  }

 private:
  std::string what_;
  int64_t all_;
  int shown_ = -1;
  bool terminal_ = ::isatty(STDERR_FILENO) != 0;
};

}  // namespace zr::host
