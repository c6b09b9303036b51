#include "cli/trainer.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>

#include "base/error.hpp"
#include "base/text.hpp"
#include "cli/bounded_run.hpp"
#include "cli/launch_process.hpp"
#include "cli/program_libraries.hpp"
#include "config/key_json.hpp"
#include "control/program_request.hpp"
#include "plan/parameter_list.hpp"

namespace zr::host::cli {

namespace fs = std::filesystem;
using control::ProgramRequest;

namespace {

constexpr double kSecondsForKeys = 60, kSecondsForParameters = 600, kMaxSeconds = 86400;
constexpr std::size_t kMaxKeysText = 16u << 20, kMaxParametersText = 256u << 20;
constexpr std::size_t kShownLines = 8;
constexpr const char* kLimitKey = " (ZR_REQUEST_SECONDS sets the limit)";

double limit_seconds(double standard) {
  const char* set = std::getenv(control::kRequestSecondsVariable);
  if (!set) return standard;
  char* end = nullptr;
  const double seconds = std::strtod(set, &end);
  if (end == set || *end || !(seconds > 0) || seconds > kMaxSeconds)
    fail_user(fmt::format("ZR_REQUEST_SECONDS={}: must be a number of seconds greater than 0 and at most 86400", set));
  return seconds;
}

bool is_program(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error) && ::access(path.c_str(), X_OK) == 0;
}

// The last lines of a text, or "".
std::string last_lines(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  std::size_t at = text.size();
  for (std::size_t n = 0; n < kShownLines && at != text.npos && at > 0; ++n) at = text.rfind('\n', at - 1);
  return at == text.npos || at == 0 ? text : text.substr(at + 1);
}

// Throws Error if the program did not end successfully within the limits. `query` is what was queried: "its keys".
void check_answer(const BoundedRun& run, BoundedRun::End end, double seconds, std::size_t max_bytes,
                  const std::string& program_text, const std::string& query) {
  const std::string lines = last_lines(run.err());
  const std::string stderr_end = lines.empty() ? "" : "; the last lines of its stderr:\n" + lines;
  if (end == BoundedRun::End::timed_out)
    fail_user(
        fmt::format("{} did not report {} within {} seconds: construct zr::Program first in its main(), or set "
                    "ZR_REQUEST_SECONDS to a larger value{}",
                    program_text, query, shortest(seconds), stderr_end));
  if (end == BoundedRun::End::output_too_long)
    fail_user(fmt::format(
        "{} printed more than {} instead of {}: name a program that constructs zr::Program first in its main(){}",
        program_text, bytes_text(static_cast<int64_t>(max_bytes)), query, stderr_end));
  if (!run.exit_status().good())
    fail_environment(fmt::format("{} {} when it was started to report {}: run it by hand to see why{}", program_text,
                                 exit_status_text(run.exit_status()), query, stderr_end));
}

}  // namespace

fs::path find_trainer(const config::Setting<std::string>& program, const fs::path& toml, const fs::path& bin) {
  const std::string& name = program;
  if (name.empty())
    fail_user(toml.string() + ": job.program is missing: set it in [job] to an executable that constructs zr::Engine");
  const fs::path given(name);
  const std::vector<fs::path> candidates =
      given.is_absolute() ? std::vector{given} : std::vector{program.given_path.base / given, bin / given};
  std::string searched;
  for (const fs::path& candidate : candidates) {
    if (is_program(candidate)) return candidate;
    std::error_code error;
    const bool exists = fs::is_regular_file(candidate, error);
    searched +=
        (searched.empty() ? "" : " and ") + candidate.string() + (exists ? " (not executable: chmod +x it)" : "");
  }
  fail_user(fmt::format("{}: job.program '{}' was not found: searched {}; build it, or correct its path",
                        program.origin.text(), program.given_path.text, searched));
}

std::string location_of_program(const config::Setting<std::string>& program) {
  return program.origin.text() + ": job.program";
}

std::vector<std::string> clean_environment(const std::vector<std::string>& extra) {
  std::vector<std::string> variables = extra;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    bool set_by_launcher = false;
    for (const char* name : {"ZR_RANK=", "ZR_WORLD=", "ZR_LOCAL_RANK=", "ZR_LOCAL_WORLD=", "ZR_STORE=", "ZR_JOB=",
                             "ZR_TOKEN=", "ZR_STEPS=", "ZR_REQUEST="})
      set_by_launcher = set_by_launcher || text.rfind(name, 0) == 0;
    if (!set_by_launcher) variables.push_back(text);
  }
  return variables;
}

namespace {

std::string text_of_program(const std::string& where, const std::string& program) {
  return fmt::format("{}the program {}", where.empty() ? "" : where + ": ", program);
}

ProcessOptions query_process(const std::vector<std::string>& argv, ProgramRequest request) {
  ProcessOptions options;
  options.file = argv[0];
  options.arguments = argv;
  options.environment = clean_environment({environment_of(request)});
  return options;
}

// Whether the program has reported the failure itself, as every program with zr::guarded does.
bool is_reported(const control::ExitStatus& exit_status, const std::string& stderr_text) {
  for (const int code : {exit_code::user, exit_code::environment, exit_code::peer_lost, exit_code::internal})
    if (!exit_status.signal && exit_status.code == code && !stderr_text.empty()) return true;
  // Other programs also end with code 1.
  return !exit_status.signal && exit_status.code == exit_code::program &&
         stderr_text.find("zeroth: error: ") != stderr_text.npos;
}

}  // namespace

std::vector<config::ConfigKey> query_keys(const fs::path& program, const std::string& toml, const std::string& where) {
  const double seconds = limit_seconds(kSecondsForKeys);
  const std::string program_text = text_of_program(where, program.string());
  provide_libraries(program.string());
  BoundedRun run(query_process({program.string(), toml}, ProgramRequest::schema), kMaxKeysText);
  const BoundedRun::End end = run.wait(seconds, program_text + " to report its keys" + kLimitKey);
  check_answer(run, end, seconds, kMaxKeysText, program_text, "its keys");
  return config::keys_from_json(run.out(), program_text);
}

Answer query_parameters(const std::vector<std::string>& argv, const std::string& where) {
  const double seconds = limit_seconds(kSecondsForParameters);
  const std::string program_text = text_of_program(where, argv[0]), query = "its parameters";
  // A program that reads its model's values or loads its data as tensors fails without memory: the second run has it.
  for (const ProgramRequest request : {ProgramRequest::parameters, ProgramRequest::parameters_in_memory}) {
    const bool last = request == ProgramRequest::parameters_in_memory;
    BoundedRun run(query_process(argv, request), kMaxParametersText);
    const BoundedRun::End end = run.wait(seconds, program_text + " to report its parameters" + kLimitKey);
    if (end == BoundedRun::End::completed && !run.exit_status().good()) {
      if (!last) continue;
      if (is_reported(run.exit_status(), run.err())) return {run.exit_status().code, {}, run.err()};
    }
    check_answer(run, end, seconds, kMaxParametersText, program_text, query);
    return {0, plan::parameters_from_json(run.out(), program_text), run.err()};
  }
  fail_internal("the last query of the parameters always returns or throws");
}

}  // namespace zr::host::cli
