// `zeroth doctor`: checks the machine, the installation, and what a job needs of them.
#pragma once

#include <boost/program_options.hpp>
#include <filesystem>

#include "cli/command.hpp"

namespace zr::host::cli {

/// Adds the options of the command.
void doctor_options(boost::program_options::options_description& options);

/// Prints the report. Returns 0, exit_code::environment if a problem would make a job fail, or the exit code of the
/// error in the TOML file if that is the only problem. `bin` is the folder of the programs of the build or
/// installation. Starts no program of a job and changes nothing on the machine.
int examine_machine(const Command& command, const Parsed& parsed, const std::filesystem::path& bin);

}  // namespace zr::host::cli
