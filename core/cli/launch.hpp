// Starts a program once per rank on this node, runs the job's store, merges the output, and waits for every rank.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace zr::host::cli {

struct LaunchOptions {
  int ranks = 1;
  int threads = 0;                   // per rank; 0: this process's cores / ranks, at least 1
  std::vector<std::string> program;  // argv; argv[0] is searched in PATH if it has no slash
  std::vector<std::pair<std::string, std::string>> environment;  // additional variables of the ranks
  bool raw_rank0 = true;  // pass rank 0's output through unchanged; false: prefix its lines like those of other ranks
};

/// Runs the job and returns the exit code of `zeroth launch`: 0 if every rank ended with 0; 4 if a rank was killed or
/// lost (the failure report is on stderr); otherwise the code of the first rank that failed; 128 + signal if SIGINT,
/// SIGTERM or SIGHUP stopped the job. Throws UserError if the program does not exist or is not executable,
/// EnvironmentError if the system cannot start it. Call it from a process without other threads that write or start
/// programs; until it returns, it handles SIGCHLD, SIGINT, SIGTERM, SIGHUP and SIGPIPE.
///
/// Each rank gets the variables ZR_RANK, ZR_WORLD, ZR_LOCAL_RANK, ZR_LOCAL_WORLD, ZR_STORE, ZR_JOB, ZR_TOKEN,
/// ZR_THREADS, and OMP_NUM_THREADS unless the user has set it. Its stdout and stderr are pipes.
int launch(const LaunchOptions& options);

}  // namespace zr::host::cli
