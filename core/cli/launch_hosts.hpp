// Starts a program on several hosts through mpirun, runs the job's store, and prints the output like launch().
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cli/hosts.hpp"

namespace zr::host::cli {

struct HostLaunchOptions {
  std::vector<HostRanks> hosts;
  int threads = 0;                                               // per rank; 0: each host's cores / its ranks
  std::vector<std::string> program;                              // argv, as every host finds it
  std::vector<std::pair<std::string, std::string>> environment;  // additional variables of the ranks
};

/// Runs the job and returns the exit code of `zeroth launch`: 0 if every rank ended with 0; 4 if a rank was killed or
/// lost (the failure report is on stderr); otherwise the code of mpirun, which is that of a rank that failed; 128 +
/// signal if SIGINT, SIGTERM or SIGHUP stopped the job. Throws EnvironmentError if mpirun cannot be started, or if it
/// is not known at which address the hosts reach this machine. Its other rules are those of launch().
///
/// The ranks are numbered host by host. They get mpirun's variables and ZR_STORE, ZR_JOB, ZR_TOKEN, and those of this
/// process whose names begin with ZR_ or OMP_. The store listens on the address of this machine from which the first
/// other host is reached, or on that of ZR_STORE.
int launch_on_hosts(const HostLaunchOptions& options);

}  // namespace zr::host::cli
