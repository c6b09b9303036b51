// The progress of training on standard output: a bar that is redrawn on a terminal, otherwise lines.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "zr/mutex.hpp"

namespace zr::host::run {

/// What is shown of a step.
struct StepProgress {
  int64_t step = 0, steps = 0;  // the first step is 1
  double loss = 0, lr = 0;
  double rate = 0, seconds_left = 0;                       // rate: `unit` per second
  std::array<int64_t, 3> memory{};                         // peak bytes of this rank by tier
  std::vector<std::pair<std::string_view, double>> waits;  // seconds of training by cause
  int64_t written_bytes = -1;                              // to disk tiers; -1: no disk tier is in use
  bool skipped = false;                                    // because gradients were not finite
  double loss_scale = 0;                                   // 0: not fp16
  std::string unit = "tokens";                             // what the rate counts
};

/// One line without colours and of any width.
std::string progress_line(const StepProgress& now);
/// At most `columns` - 1 columns wide, so that no terminal wraps it; a field that does not fit is left out.
std::string progress_on_terminal(const StepProgress& now, int columns, bool colours);

/// Whether ZR_PROGRESS permits progress and plan on standard output: it is not "off".
bool progress_wanted();

/// Writes to standard output what ZR_PROGRESS selects: "plain" (lines), "tty" or "tty:DEVICE" (a bar, as wide as the
/// terminal DEVICE), "off" (nothing); without it a bar if standard output is a terminal, else lines. A log line is
/// written above the bar. Training thread only, except erase() and draw().
class ProgressDisplay : public CurrentLine {
 public:
  /// Reads ZR_PROGRESS; shows nothing if `shows` is false.
  explicit ProgressDisplay(bool shows);
  /// Ends the terminal's line.
  ~ProgressDisplay() override;
  ProgressDisplay(const ProgressDisplay&) = delete;

  /// True if the next step should be shown: every 0.1 s on a terminal, every 5 s otherwise.
  bool due() const;
  void show(const StepProgress& now) ZR_EXCLUDES(mutex_);
  /// Writes a complete line.
  void note(const std::string& line) ZR_EXCLUDES(mutex_);
  /// Erase the bar and draw it again, if the terminal's line shows one. For log().
  void erase() override ZR_EXCLUDES(mutex_);
  void draw() override ZR_EXCLUDES(mutex_);

 private:
  enum class Mode { none, lines, terminal } mode_ = Mode::none;
  std::string device_;  // of the terminal; "": standard output
  bool colours_ = false;
  Mutex mutex_;
  std::string bar_ ZR_GUARDED_BY(mutex_);  // what the terminal's line shows; "": nothing
  std::chrono::steady_clock::time_point shown_{};
};

}  // namespace zr::host::run
