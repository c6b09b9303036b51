// The commands of the executable `zeroth`, and those of their functions that take the parsed command line.
#pragma once

#include <boost/program_options.hpp>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/command.hpp"

namespace zr::host::cli {

/// Runs the command line `arguments` (without the program name) and returns the exit code. Throws Error.
int run_command(const std::vector<std::string>& arguments);

/// `zeroth train`: validates the file and starts its program on job.ranks ranks; returns the exit code. If another
/// launcher, such as mpirun, has started this process as one of several ranks, replaces it by the program instead,
/// which validates the file for the launcher's number of ranks, and does not return. Throws Error.
int train_job(const Command& command, const Parsed& parsed, const std::filesystem::path& bin);

/// `zeroth conform`: checks a plug-in against the rules of the ABI, prints the results, and returns 0, or
/// exit_code::user if a rule does not hold or nothing was checked. Throws Error.
int conform_plugin(const Command& command, const Parsed& parsed);
void conform_options(boost::program_options::options_description& options);

/// `zeroth doctor`: checks the machine, the installation, and what a job needs of them, and prints the report. Returns
/// 0, exit_code::environment if a problem would make a job fail, or the exit code of the error in the TOML file if that
/// is the only problem. `bin` is the folder of the programs of the build or installation. Starts no program of a job
/// and changes nothing on the machine.
int examine_machine(const Command& command, const Parsed& parsed, const std::filesystem::path& bin);
void doctor_options(boost::program_options::options_description& options);

}  // namespace zr::host::cli
