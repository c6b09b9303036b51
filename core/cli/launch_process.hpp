// The process of a rank: in its own process group, killed when the launcher ends, with its output in pipes.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "control/failure_report.hpp"

namespace zr::host::cli {

struct Process {
  pid_t pid = -1;          // also its process group
  int out = -1, err = -1;  // read ends, which the caller closes; err is -1 if both streams share one pipe
};

struct ProcessOptions {
  std::string file;                      // the file to execute, from find_program()
  std::vector<std::string> arguments;    // argv
  std::vector<std::string> environment;  // NAME=value
  bool reads_stdin = false;              // inherit stdin; false: stdin is /dev/null
  bool one_pipe = false;                 // use one pipe for stdout and stderr
};

/// The file that a shell would run for this name. Throws UserError if no such file exists.
std::string find_program(const std::string& name);

/// Starts a process. Throws Error if the file cannot be executed or the system lacks resources. The process is killed
/// when the calling thread ends. Signals that launch() handles get their default disposition in it, except those that
/// were ignored before launch().
Process start_process(const ProcessOptions& options);

/// Returns how `pid` ended, or nothing if it still runs. If it ended, kills the rest of its process group.
std::optional<control::ExitStatus> reap(pid_t pid);

/// The number of processes that the kernel has killed for lack of memory since boot, or -1 if it is not known.
long kernel_oom_kills();

}  // namespace zr::host::cli
