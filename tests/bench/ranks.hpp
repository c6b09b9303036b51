// For benchmarks that start their own ranks.
#pragma once

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include "zr/program.hpp"

namespace zr::bench {

/// main() of a benchmark, PROGRAM ROWS.json: calls measure(toml, rows, world) on each rank for each world size, one
/// after the other. Returns the exit code of the first failed run, or 2 for invalid arguments.
template <class F>
int on_ranks(int argc, char** argv, const std::vector<int>& worlds, F&& measure) {
  if (argc != 2) return 2;
  if (const char* world = std::getenv("ZR_WORLD"))
    return zr::guarded(
        [&] { measure(std::string(ZR_SOURCE_DIR "/tests/bench/bench.toml"), std::string(argv[1]), std::atoi(world)); });
  for (const int world : worlds) {
    const std::string ranks = std::to_string(world);
    const pid_t launch = ::fork();
    if (launch < 0) return 1;
    if (launch == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGTERM);
      ::execl(ZR_BUILD_DIR "/bin/zeroth", "zeroth", "launch", "-n", ranks.c_str(), "--", argv[0], argv[1],
              static_cast<char*>(nullptr));
      ::_exit(127);
    }
    int status = 0;
    if (::waitpid(launch, &status, 0) != launch || !WIFEXITED(status)) return 1;
    if (WEXITSTATUS(status) != 0) return WEXITSTATUS(status);
  }
  return 0;
}

/// Calls measure(toml, rows) on two ranks.
template <class F>
int on_two_ranks(int argc, char** argv, F&& measure) {
  return on_ranks(argc, argv, {2}, [&](const std::string& toml, const std::string& rows, int) { measure(toml, rows); });
}

}  // namespace zr::bench
