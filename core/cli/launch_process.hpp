// A rank's process: started in its own group, dying with the launcher, its output in pipes.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "control/failure_report.hpp"

namespace zr::host {

struct Process {
  pid_t pid = -1;          // also its process group
  int out = -1, err = -1;  // ends to read from; err is -1 if both streams are one. The caller closes them
};

struct ProcessOptions {
  std::string file;                      // to execute, as found by find_program
  std::vector<std::string> arguments;    // argv
  std::vector<std::string> environment;  // NAME=value
  bool reads_stdin = false;              // else it reads /dev/null
  bool one_pipe = false;                 // for stdout and stderr
};

/// The file a shell would run. Throws Failure(user) with the remedy.
std::string find_program(const std::string& name);

/// Throws Failure if the file cannot be executed or the machine has no room. The process is killed when the calling
/// thread ends; it gets default dispositions for the signals that launch() handles, but those that were ignored before
/// it.
Process start_process(const ProcessOptions& options);

/// How `pid` ended, or nothing if it runs. What is left of its process group is killed.
std::optional<ExitStatus> reap(pid_t pid);

/// How many processes the kernel has killed for lack of memory since it started; -1 if it does not tell.
long kernel_oom_kills();

}  // namespace zr::host
