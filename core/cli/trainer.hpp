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

/// Starts the program with ZR_ASK=schema and reads its answer. Throws Failure naming program and output if it gives
/// none within a minute.
std::vector<Key> ask_keys(const std::filesystem::path& program, const std::string& toml);

/// A program's answer, or the exit code it ended with instead; and what it wrote to stderr.
struct Answer {
  int code;
  std::vector<Parameter> parameters;
  std::string said;
};
/// Starts the trainer, argv[0] an absolute path, with ZR_ASK=parameters: it builds its model without memory, says what
/// it would train, and ends; where it cannot, with ZR_ASK=parameters_in_memory. It may take its time. Throws
/// Failure(user) if it ends without having said it.
Answer ask_parameters(const std::vector<std::string>& argv);

/// The environment of this process without what a launcher says to a rank, and with `extra` ("NAME=value").
std::vector<std::string> clean_environment(const std::vector<std::string>& extra);

}  // namespace zr::host
