// The process of a rank: in its own process group, killed when the launcher ends, with its output in pipes. Orphans.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "control/failure_report.hpp"

namespace zr::host::cli {

struct Process {
  pid_t pid = -1;
  int out = -1, err = -1;  // read ends, which the caller closes; err is -1 if both streams share one pipe
  pid_t group = pid;       // its process group
};

struct ProcessOptions {
  std::string file;                      // the file to execute, from find_program()
  std::vector<std::string> arguments;    // argv
  std::vector<std::string> environment;  // NAME=value
  bool reads_stdin = false;              // inherit stdin; false: stdin is /dev/null
  bool one_pipe = false;                 // use one pipe for stdout and stderr
  /// Each write() of the process is read() on its own, in packets of at most packet_bytes().
  bool packets = false;
};
/// The size of a page: read() of a pipe with packets needs a buffer of this size.
std::size_t packet_bytes();

/// The file that a shell would run for this name. Throws UserError if no such file exists.
std::string find_program(const std::string& name);

/// Starts a process. Throws Error if the file cannot be executed or the system lacks resources. The process is killed
/// when the calling thread ends. Signals that launch() handles get their default disposition in it, except those that
/// were ignored before launch().
Process start_process(const ProcessOptions& options);

/// Returns how `pid` ended, or nothing if it still runs. If it ended, kills the rest of the process group `group` (0:
/// the group `pid`), unless `keeps` returns true for its end.
std::optional<control::ExitStatus> reap(pid_t pid, pid_t group = 0,
                                        const std::function<bool(const control::ExitStatus&)>& keeps = {});

/// While the object exists, processes whose parent ends become children of this process, if it has started one of their
/// ancestors. Call reap() for `pid` itself.
class OrphanAdoption {
 public:
  OrphanAdoption();
  ~OrphanAdoption();
  OrphanAdoption(const OrphanAdoption&) = delete;
  /// Removes children that have ended, up to the child `except`.
  void reap_all_but(pid_t except) const;
  /// Removes children that have ended, except those in `except`.
  void reap_others(const std::set<pid_t>& except) const;
  /// Kills the children whose environment has `variable` ("NAME=value"), then their children, and so on. Returns when
  /// all have ended, at the latest after 5 seconds. Returns the number of killed processes.
  int kill_with(const std::string& variable) const;
};

/// The number of processes that the kernel has killed for lack of memory since boot, or -1 if it is not known.
long kernel_oom_kills();

}  // namespace zr::host::cli
