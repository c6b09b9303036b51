// Log lines on standard error: "zeroth: text", "zeroth: warning: text". Thread-safe.
#pragma once

#include <functional>
#include <string>

#include "zr/abi/host.h"

namespace zr::host {

/// Writes one line if `level` (ZR_LOG_*) is at least the threshold; ZR_LOG=debug|info|warn|error sets it, info by
/// default. Escapes control characters other than newline and tab (printable()). The caller escapes names from files
/// and peers, newlines too.
void log(int level, const std::string& text);
/// What the lines about ranks in the report of a failed job follow.
inline constexpr const char* kRanksTitle = "the job has failed; its ranks:";
/// Logs an error. If `text` is the report of a failed job, a cause with one line per rank below it, logs the ranks
/// first, so that the cause is the last line.
void log_failure(const std::string& text);
/// Calls fn, for destructors: logs its exception as an error instead of throwing it.
void log_exception_of(const std::function<void()>& fn) noexcept;
/// Text on the terminal's current line, such as a progress bar, which a log line must not be appended to. log() calls
/// the functions from any thread, one at a time; they must not log.
class CurrentLine {
 public:
  virtual ~CurrentLine() = default;
  virtual void erase() = 0;  // before a log line
  virtual void draw() = 0;   // after it
};
/// Sets the line that log() erases and draws again. It must call remove_current_line() before it is destroyed.
void set_current_line(CurrentLine* line);
/// From now on log() does not use `line`.
void remove_current_line(const CurrentLine* line);
/// Raises the threshold to warn on ranks above 0. Call it as soon as the rank is known.
void log_as_rank(int rank);
/// Inside a catch block: writes the exception in flight as an error and returns the process's exit code for it.
int report_exception();
/// As report_exception(), in a program built on zr::Engine: an exception that is not the host's belongs to the program
/// (exit code 1; std::invalid_argument 2). Omits libtorch's C++ stack unless TORCH_SHOW_CPP_STACKTRACES=1.
int report_program_exception();
/// Sets the function that returns the remedy for an exception of the program, given its type and text; "" if unknown.
void set_advice(std::string (*advice)(const std::string& type, const std::string& text));

}  // namespace zr::host
