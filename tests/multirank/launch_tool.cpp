// launch() as a command of its own, without libtorch: launch_tool RANKS PROGRAM ARGS...
#include <cstdio>
#include <cstdlib>

#include "base/failure.hpp"
#include "base/log.hpp"
#include "cli/launch.hpp"

int main(int argc, char** argv) {
  try {
    zr::host::LaunchOptions options;
    options.ranks = argc > 1 ? std::atoi(argv[1]) : 0;
    for (int i = 2; i < argc; ++i) options.program.emplace_back(argv[i]);
    return zr::host::launch(options);
  } catch (const zr::host::Failure& failure) {
    zr::host::log(ZR_LOG_ERROR, failure.what());
    return failure.code();
  }
}
