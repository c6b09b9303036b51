// A benchmark that starts its two ranks itself.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "zr/program.hpp"

namespace zr::bench {

/// main() of such a program, PROGRAM ROWS.json: measure(toml, rows) on each rank.
template <class F>
int on_two_ranks(int argc, char** argv, F&& measure) {
  if (argc != 2) return 2;
  if (!std::getenv("ZR_WORLD"))
    ::execl(ZR_BUILD_DIR "/bin/zeroth", "zeroth", "launch", "-n", "2", "--", argv[0], argv[1],
            static_cast<char*>(nullptr));
  return zr::guarded([&] { measure(std::string(ZR_SOURCE_DIR "/tests/bench/bench.toml"), std::string(argv[1])); });
}

}  // namespace zr::bench
