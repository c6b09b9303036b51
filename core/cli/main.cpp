// zeroth: see commands.cpp.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <iostream>

#include "base/failure.hpp"
#include "base/log.hpp"
#include "cli/commands.hpp"

namespace {
int run(int argc, char** argv) {
  try {
    return zr::host::run_command({argv + 1, argv + argc});
  } catch (...) {
    return zr::host::report_exception();
  }
}

// What a command printed is part of its result: if a full disk or a closed pipe took only some of it, the command
// failed.
int check_output(int code) {
  errno = 0;
  std::cout.flush();
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && std::cout && !std::ferror(stdout)) return code;
  const std::string why = errno ? std::string(": ") + std::strerror(errno) : "";
  zr::host::log(ZR_LOG_ERROR, "cannot write all output to standard output" + why +
                                  "; free space where it goes, or keep its reader running");
  return code ? code : static_cast<int>(zr::host::Exit::environment);
}
}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe is a write error like a full disk; programs it starts get the default
  return check_output(run(argc, argv));
}
