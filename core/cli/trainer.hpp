// The program that a file names in job.program: found, and asked which keys it reads.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "plan/plan.hpp"

namespace zr::host {

/// The executable of a job.program entry: an absolute path, or a name looked for beside the TOML file, then in `bin`.
/// Throws Failure(user) naming the places and the remedy.
std::filesystem::path find_trainer(const Entry& program, const std::filesystem::path& toml,
                                   const std::filesystem::path& bin);

/// "gpt.toml:3:11: job.program", for messages.
std::string location_of_program(const Entry& program);

/// Starts the program with ZR_ASK=schema and reads its answer, of at most 16 MiB, within a minute (ZR_ASK_SECONDS).
/// `where` begins messages: the place of job.program ("gpt.toml:3:11"). Throws Failure naming program, exit status and
/// the last lines of its stderr if it gives none.
std::vector<ConfigKey> ask_keys(const std::filesystem::path& program, const std::string& toml,
                                const std::string& where = "");

/// A program's answer, or the exit code with which it reported a mistake instead; and what it wrote to stderr, of which
/// the last 64 KiB are kept.
struct Answer {
  int code;
  std::vector<Parameter> parameters;
  std::string stderr_text;
};
/// Starts the trainer, argv[0] an absolute path, with ZR_ASK=parameters: it builds its model without memory, says what
/// it would train, and ends; where it cannot, with ZR_ASK=parameters_in_memory. Each has ten minutes (ZR_ASK_SECONDS)
/// and an answer of at most 256 MiB. Throws Failure as ask_keys() does, unless the program ended with an exit code of
/// zeroth's and a message.
Answer ask_parameters(const std::vector<std::string>& argv, const std::string& where);

/// The environment of this process without what a launcher says to a rank, and with `extra` ("NAME=value").
std::vector<std::string> clean_environment(const std::vector<std::string>& extra);

}  // namespace zr::host
