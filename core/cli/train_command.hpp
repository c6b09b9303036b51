// `zeroth train`: starts the program that a TOML file names.
#pragma once

#include <filesystem>

#include "cli/command.hpp"

namespace zr::host::cli {

/// Validates the file and starts its program on job.ranks ranks; returns the exit code. If another launcher, such as
/// mpirun, has started this process as one of several ranks, replaces it by the program instead, which validates the
/// file for the launcher's number of ranks, and does not return. Throws Error.
int train_job(const Command& command, const Parsed& parsed, const std::filesystem::path& bin);

}  // namespace zr::host::cli
