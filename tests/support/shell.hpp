// Runs a shell command and returns its output, for tests that run compilers and binutils.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace zr::testing {

struct Outcome {
  int code;            // exit status; 128 and above: a signal
  std::string output;  // standard output and error
  std::vector<std::string> lines() const {
    std::vector<std::string> all;
    std::istringstream in(output);
    for (std::string line; std::getline(in, line);) all.push_back(line);
    return all;
  }
};

inline Outcome shell(const std::string& command) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (!pipe) throw std::runtime_error("cannot run: " + command);
  Outcome outcome{0, ""};
  char buffer[4096];
  for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) outcome.output.append(buffer, n);
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

inline bool has_program(const std::string& name) { return shell("command -v " + name).code == 0; }

}  // namespace zr::testing
