// `zeroth train`: starts the program that a TOML file names.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"
#include "cli/commands.hpp"
#include "cli/job_file.hpp"
#include "cli/launch.hpp"
#include "cli/launch_hosts.hpp"
#include "cli/program_libraries.hpp"
#include "cli/trainer.hpp"
#include "control/environment.hpp"
#include "job/checkpoint_paths.hpp"

namespace zr::host::cli {

namespace {

[[noreturn]] void become(const Arguments& program) {
  provide_libraries(program[0]);
  std::vector<char*> arguments;
  for (const std::string& one : program) arguments.push_back(const_cast<char*>(one.c_str()));
  arguments.push_back(nullptr);
  ::execv(arguments[0], arguments.data());
  fail_environment(fmt::format("'{}' cannot be executed: {}", program[0], std::strerror(errno)));
}

}  // namespace

int train_job(const Command& command, const Parsed& parsed, const std::filesystem::path& bin) {
  if (parsed.positionals.empty()) fail_usage(command, "no TOML file is given");
  const std::string& file = parsed.positionals[0];
  Arguments overrides(parsed.positionals.begin() + 1, parsed.positionals.end());
  if (parsed.has("resume")) overrides.emplace_back("checkpoint.resume=true");
  if (parsed.has("ranks")) overrides.push_back("job.ranks=" + parsed.value("ranks"));
  const auto program_of = [&](const config::Setting<std::string>& program) {
    Arguments argv{find_trainer(program, file, bin), file};
    argv.insert(argv.end(), overrides.begin(), overrides.end());
    return argv;
  };
  if (const std::string launcher = control::launcher_of_several(std::getenv, ::getpid()); !launcher.empty()) {
    if (parsed.has("hosts"))
      fail_user(fmt::format(
          "zeroth train: --hosts {} starts the ranks, but {} has started this process as one of several ranks; remove "
          "--hosts, or start one `zeroth train` without {}",
          parsed.value("hosts"), launcher, launcher));
    become(program_of(config::Document::load(file, overrides).program()));
  }
  const JobFile job = validate_file(file, overrides, plugin::Registry(), bin);
  const int ranks = job.config.job().ranks, threads = job.config.job().threads;
  const Arguments program = program_of(job.config.job().program);
  if (!parsed.has("hosts")) job::check_checkpoint_paths(job.config.checkpoint());  // of this machine
  if (parsed.has("hosts")) {
    const auto hosts = parse_hosts(command.name, parsed.value("hosts"));
    if (ranks_of(hosts) != ranks)
      fail_user(
          fmt::format("zeroth train: --hosts {} has {} ranks, but job.ranks is {}; add job.ranks={} to the command",
                      parsed.value("hosts"), ranks_of(hosts), ranks, ranks_of(hosts)));
    return launch_on_hosts({hosts, threads, program, {}});
  }
  return launch({ranks, threads, program, {}});
}

}  // namespace zr::host::cli
