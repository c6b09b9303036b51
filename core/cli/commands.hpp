// The commands of the executable `zeroth`.
#pragma once

#include <string>
#include <vector>

namespace zr::host::cli {

/// Runs the command line `arguments` (without the program name) and returns the exit code. Throws Error.
int run_command(const std::vector<std::string>& arguments);

}  // namespace zr::host::cli
