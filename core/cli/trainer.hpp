// Finds the program that a TOML file names in job.program, and queries its keys and parameters.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "plan/plan.hpp"

namespace zr::host::cli {

/// The executable that job.program names: an absolute path, or a name that is searched in the folder of the TOML file
/// and then in `bin`. Throws UserError with the searched paths if it does not exist.
std::filesystem::path find_trainer(const config::Setting<std::string>& program, const std::filesystem::path& toml,
                                   const std::filesystem::path& bin);

/// Where job.program is set, as a prefix of messages: "gpt.toml:3:11: job.program".
std::string location_of_program(const config::Setting<std::string>& program);

/// Starts the program with ZR_REQUEST=schema and returns the keys that it prints. Limits: 16 MiB of output and one
/// minute (ZR_REQUEST_SECONDS). `where` is the prefix of messages, from location_of_program(). Throws Error with the
/// program, its exit status and the last lines of its stderr if it does not answer.
std::vector<config::ConfigKey> query_keys(const std::filesystem::path& program, const std::string& toml,
                                          const std::string& where = "");

/// The parameters of a program (code 0), or the exit code with which the program reported an error; and the last 64 KiB
/// of its stderr.
struct Answer {
  int code;
  std::vector<plan::Parameter> parameters;
  std::string stderr_text;
};
/// Starts the program (argv[0] is an absolute path) with ZR_REQUEST=parameters: it builds its model without memory,
/// prints its parameters and ends. If this fails, starts it again with ZR_REQUEST=parameters_in_memory. Limits of each
/// run: ten minutes (ZR_REQUEST_SECONDS) and 256 MiB of output. Throws Error like query_keys(), unless the program
/// ended with an exit code of Zeroth and a message.
Answer query_parameters(const std::vector<std::string>& argv, const std::string& where);

/// The environment of this process, without the variables that a launcher sets for a rank, plus `extra` ("NAME=value").
std::vector<std::string> clean_environment(const std::vector<std::string>& extra);

}  // namespace zr::host::cli
