// Starts a program once per rank on this host, keeps the job's store, merges output, and sees every rank to its end.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace zr::host {

struct LaunchOptions {
  int ranks = 1;
  int threads = 0;                   // per rank; 0: this process's cores / ranks, at least 1
  std::vector<std::string> program;  // argv; the first is looked up in PATH if it has no slash
  std::vector<std::pair<std::string, std::string>> environment;  // added to the ranks'
  bool raw_rank0 = true;  // rank 0's output passes as it is, else it is prefixed like the others'
};

/// Runs the job and returns the exit code of `zeroth launch`: 0 if every rank ended with 0; 4 if one was killed or lost
/// (the table is on stderr); else the code of the first rank that failed; 128 + signal if SIGINT, SIGTERM or SIGHUP
/// stopped it. Throws Failure(user) for a program that is not there or not executable, Failure(environment) for what
/// the machine refuses. Call it from a process without other threads that write or start programs; it takes over
/// SIGCHLD, SIGINT, SIGTERM, SIGHUP and SIGPIPE until it returns.
///
/// A rank sees ZR_RANK, ZR_WORLD, ZR_LOCAL_RANK, ZR_LOCAL_WORLD, ZR_STORE, ZR_JOB, ZR_TOKEN, ZR_THREADS and
/// OMP_NUM_THREADS (unless the user set it). Its output is a pipe, whatever the launcher's is.
int launch(const LaunchOptions& options);

}  // namespace zr::host
