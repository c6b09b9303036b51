// The commands of `zeroth`.
#pragma once

#include <string>
#include <vector>

namespace zr::host {

/// Runs `zeroth` with these arguments (without the program's name) and returns its exit code. Throws Failure.
int run_command(const std::vector<std::string>& arguments);

}  // namespace zr::host
