#include "cli/train_command.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"
#include "base/terminal.hpp"
#include "cli/job_file.hpp"
#include "cli/launch.hpp"
#include "cli/launch_hosts.hpp"
#include "cli/program_libraries.hpp"
#include "cli/trainer.hpp"
#include "control/environment.hpp"

namespace zr::host::cli {

namespace {

// ZR_PROGRESS of the ranks: what this process's standard output is. Their own is a pipe. mpirun gives its process a
// terminal even if its own output is a file.
std::string progress_mode() {
  if (!is_terminal(STDOUT_FILENO) || std::getenv("OMPI_COMM_WORLD_RANK")) return "plain";
  char device[PATH_MAX];
  return ::ttyname_r(STDOUT_FILENO, device, sizeof device) == 0 ? std::string("tty:") + device : "tty";
}

[[noreturn]] void become(const Arguments& program) {
  provide_libraries(program[0]);
  ::setenv("ZR_PROGRESS", "plain", 1);  // of rank 0, to which mpirun gives a terminal of its own
  std::vector<char*> arguments;
  for (const std::string& one : program) arguments.push_back(const_cast<char*>(one.c_str()));
  arguments.push_back(nullptr);
  ::execv(arguments[0], arguments.data());
  fail_environment(fmt::format("'{}' cannot be executed: {}", program[0], std::strerror(errno)));
}

}  // namespace

int train_job(const Command& command, const Parsed& parsed, const std::filesystem::path& bin) {
  if (parsed.words.empty()) fail_usage(command, "no TOML file is given");
  const std::string& file = parsed.words[0];
  Arguments overrides(parsed.words.begin() + 1, parsed.words.end());
  if (parsed.has("resume")) overrides.emplace_back("checkpoint.resume=true");
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
  if (parsed.has("hosts")) {
    const auto hosts = parse_hosts(command.name, parsed.value("hosts"));
    if (ranks_of(hosts) != ranks)
      fail_user(
          fmt::format("zeroth train: --hosts {} has {} ranks, but job.ranks is {}; add job.ranks={} to the command",
                      parsed.value("hosts"), ranks_of(hosts), ranks, ranks_of(hosts)));
    return launch_on_hosts({hosts, threads, program, {{"ZR_PROGRESS", "plain"}}});
  }
  return launch({ranks, threads, program, {{"ZR_PROGRESS", progress_mode()}}});
}

}  // namespace zr::host::cli
