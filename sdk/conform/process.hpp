// Runs a check in a process of its own, within a time limit.
#pragma once

#include <functional>
#include <string>

namespace zr::conform {

enum class Verdict { pass, fail, skip };

/// How a process ended.
struct Outcome {
  Verdict verdict = Verdict::pass;
  std::string reason;  // of a failure or a skip
  std::string output;  // what the check returned
};

/// Sends what a check does now to the process that waits for it.
using Note = std::function<void(const std::string&)>;

/// Runs `check` in a forked process, with its output discarded, except that the reason of
/// a crash has the last lines on stderr. Its result is the text that it returns, a Failure or
/// Skipped that it throws, the signal that ended it, or its time limit in seconds; then all its processes are killed.
/// Only for processes with one thread. Throws std::system_error if no process can be started.
Outcome run_in_process(const std::function<std::string(const Note&)>& check, double seconds);

/// Runs `body` in `world` forked processes at once, the ranks of a job. Throws the first Failure or Skipped of a rank,
/// or a Failure that says how a rank ended; the other ranks are then killed. The process must have one thread.
void run_ranks(int world, const std::function<void(int rank)>& body);

}  // namespace zr::conform
