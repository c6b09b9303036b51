// The executable `zeroth`; its commands are in commands.cpp.
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>

#include "base/file.hpp"
#include "base/log.hpp"
#include "base/process_exit.hpp"
#include "cli/commands.hpp"
#include "plugin/plugin.hpp"
#include "zr/error.hpp"

namespace {
int run(int argc, char** argv) {
  try {
    return zr::host::cli::run_command({argv + 1, argv + argc});
  } catch (...) {
    return zr::host::report_exception();
  }
}

// Whether nothing reads the pipe that standard output is, such as after `zeroth show | head`.
bool output_is_closed() {
  pollfd output{STDOUT_FILENO, 0, 0};
  return ::poll(&output, 1, 0) == 1 && (output.revents & POLLERR);
}

// The output of a command is part of its result: if it cannot be written (full disk), the command fails. If its reader
// has ended, the command ends by SIGPIPE, as other programs do.
int check_output(int code) {
  errno = 0;
  std::cout.flush();
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && std::cout && !std::ferror(stdout)) return code;
  if (output_is_closed()) {
    std::signal(SIGPIPE, SIG_DFL);
    std::raise(SIGPIPE);
  }
  const std::string reason = errno ? std::string(": ") + std::strerror(errno) : "";
  zr::host::log(ZR_LOG_ERROR, fmt::format("cannot write all output to standard output{}; free disk space, or keep the "
                                          "program running that reads the output",
                                          reason));
  return code ? code : zr::exit_code::environment;
}

// Opens /dev/null in the place of standard input, output and error that the parent has closed: otherwise the next file
// or socket of this process would have their numbers, and get what is written to them.
void open_standard_files() {
  for (int fd = ::open("/dev/null", O_RDWR); fd >= 0; fd = ::open("/dev/null", O_RDWR))
    if (fd > STDERR_FILENO) {
      ::close(fd);
      return;
    }
}
}  // namespace

int main(int argc, char** argv) {
  open_standard_files();
  std::signal(SIGPIPE, SIG_IGN);  // makes a closed pipe a write error; child processes get the default disposition
  zr::host::report_file_size_limit();
  zr::host::set_exit_function([](int code) { std::_Exit(code); });
  zr::host::plugin::probe_before_loading();
  return check_output(run(argc, argv));
}
