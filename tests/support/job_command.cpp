#include "support/job_command.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <wordexp.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <optional>
#include <regex>
#include <sstream>
#include <utility>

#include "base/log.hpp"
#include "cli/commands.hpp"
#include "support/sanitizers.hpp"

extern char** environ;

// The linker replaces the launcher's execve() by this function: see zr_multirank_test().
extern "C" int __real_execve(const char* file, char* const* arguments, char* const* environment);
extern "C" int __wrap_execve(const char* file, char* const* arguments, char* const* environment);

// Of libzeroth; core/model/process_setup.hpp.
namespace zr::host::model {
struct ProcessSetup {
  static void intercept_placeholders();
};
}  // namespace zr::host::model

namespace zr::test {
namespace {

namespace fs = std::filesystem;

bool launches_by_fork = false;  // this process runs the launcher's code

std::string this_program() { return fs::read_symlink("/proc/self/exe"); }

std::ptrdiff_t files_in(const char* folder) {
  return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

// A job of this test program.
struct Job {
  std::vector<std::pair<std::string, std::string>> environment;
  std::vector<std::string> arguments;  // of `zeroth`
};

std::optional<std::vector<std::string>> words_of(const std::string& command) {
  wordexp_t expanded;
  if (wordexp(command.c_str(), &expanded, WRDE_NOCMD | WRDE_UNDEF) != 0) return {};
  std::vector<std::string> words(expanded.we_wordv, expanded.we_wordv + expanded.we_wordc);
  wordfree(&expanded);
  return words;
}

std::optional<Job> job_of(const std::string& command) {
  const auto words = words_of(command);
  if (!words) return {};
  Job job;
  auto word = words->begin();
  for (; word != words->end() && word->find('=') != std::string::npos; ++word) {
    const auto equals = word->find('=');
    // Variables that only the start of a program reads.
    for (const char* prefix : {"LD_", "OMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES"})
      if (word->starts_with(prefix)) return {};
    job.environment.emplace_back(word->substr(0, equals), word->substr(equals + 1));
  }
  if (word == words->end() || *word != ZR_BUILD_DIR "/bin/zeroth") return {};
  job.arguments.assign(word + 1, words->end());
  const auto separator = std::find(job.arguments.begin(), job.arguments.end(), "--");
  if (job.arguments.empty() || job.arguments[0] != "launch" || job.arguments.end() - separator < 4 ||
      separator[1] != this_program() || separator[2] != "--rank")
    return {};
  return job;
}

// With ZR_TEST_HOSTS=N, the same job on N hosts that its ranks pretend to be on, connected by MPI; "" if the job has
// one rank, or says itself how its ranks communicate.
std::string over_hosts(const Job& job) {
  const char* const hosts = std::getenv("ZR_TEST_HOSTS");
  const std::vector<std::string>& words = job.arguments;
  const bool is_plain = words.size() > 4 && words[1] == "-n" && words[2] != "1" && words[3] == "--";
  if (!hosts || !is_plain || std::ranges::any_of(words, [](const std::string& word) {
        return word.starts_with("communicator=") || word.starts_with("job.device=");
      }))
    return "";
  std::string command = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; ";
  const auto quoted = [](const std::string& word) {
    return "'" + std::regex_replace(word, std::regex("'"), "'\\''") + "' ";
  };
  for (const auto& [name, value] : job.environment) command += "export " + name + "=" + quoted(value) + "; ";
  command += ZR_BUILD_DIR "/bin/zeroth launch --hosts localhost:" + words[2] +
             " -- sh -c 'ZR_HOST_ID=$((OMPI_COMM_WORLD_RANK * " + hosts + " / " + words[2] + ")) exec \"$@\"' sh ";
  for (std::size_t i = 4; i < words.size(); ++i) command += quoted(words[i]);
  return command + "communicator=mpi communicator.mpi.hierarchy_min_bytes=0";
}

// mpirun reports a rank that has failed, beside the report of `zeroth`.
testing::Outcome without_lines_of_mpirun(testing::Outcome outcome) {
  static const std::regex report(
      "(-{70,}|Primary job  terminated normally, but .*|a non-zero exit code\\. Per user-direction, .*|"
      "mpirun detected that one or more processes exited .*|the job to be terminated\\. .*|  Process name: \\[\\[.*|"
      "  Exit code: .*|mpirun noticed that process rank .*)");
  std::istringstream lines(std::exchange(outcome.output, ""));
  bool in_report = false;  // which has empty lines
  for (std::string line; std::getline(lines, line);) {
    in_report = std::regex_match(line, report) || (in_report && line.empty());
    if (!in_report) outcome.output += line + "\n";
  }
  return outcome;
}

testing::Outcome run_in_shell(const std::string& command, const std::string& folder,
                              const std::map<std::string, std::string>& environment) {
  std::string variables;
  for (const auto& [name, value] : environment) variables += "export " + name + "='" + value + "'; ";
  return testing::shell("cd '" + folder + "' && " + variables + "(" + command + ")");
}

[[noreturn]] void launch(const Job& job, const std::string& folder,
                         const std::map<std::string, std::string>& environment, int output) {
  launches_by_fork = true;
  int code = 0;
  try {
    skip_earlier_destructors();
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    for (const auto& [name, value] : job.environment) setenv(name.c_str(), value.c_str(), 1);
    fs::current_path(folder);
    std::signal(SIGPIPE, SIG_IGN);  // like main() of zeroth
    code = host::cli::run_command(job.arguments);
  } catch (...) {
    code = host::report_exception();
  }
  std::exit(code);
}

}  // namespace

void skip_earlier_destructors() {
  if (kSanitized) return;
  const auto end = [](int code, void*) {
    std::cout.flush();
    std::fflush(nullptr);
    _exit(code);
  };
  on_exit(end, nullptr);
}

testing::Outcome run_job_command(const std::string& command, const std::string& folder,
                                 const std::map<std::string, std::string>& environment) {
  const auto named = std::getenv("ZR_TEST_HOSTS") ? job_of(command) : std::nullopt;
  const std::string over = named ? over_hosts(*named) : "";
  const bool has_one_rank = named && named->arguments.size() > 2 && named->arguments[2] == "1";
  if (named && over.empty() && !has_one_rank)
    std::cout << "one host only: the job names its communicator, device or hosts\n";  // .ci/test counts such lines
  if (!over.empty()) return without_lines_of_mpirun(run_in_shell(over, folder, environment));
  const bool forks = !kSanitized && files_in("/proc/self/task") == 1 && !::testing::Test::HasFailure();
  const auto job = forks ? job_of(command) : std::nullopt;
  if (!job) return run_in_shell(command, folder, environment);
  host::model::ProcessSetup::intercept_placeholders();  // here, so that not each rank writes its own copy of libtorch's
                                                        // tables of operators
  std::cout.flush();
  std::fflush(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2: " + std::string(std::strerror(errno)));
  const pid_t pid = fork();
  if (pid < 0) throw std::runtime_error("fork: " + std::string(std::strerror(errno)));
  if (pid == 0) launch(*job, folder, environment, ends[1]);
  close(ends[1]);
  testing::Outcome outcome{0, ""};
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0 || (n < 0 && errno == EINTR);)
    if (n > 0) outcome.output.append(buffer, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

}  // namespace zr::test

int __wrap_execve(const char* file, char* const* arguments, char* const* environment) {
  if (!zr::test::launches_by_fork) return __real_execve(file, arguments, environment);
  for (int fd = 3; fd < 1024; ++fd)
    if (const int flags = fcntl(fd, F_GETFD); flags >= 0 && (flags & FD_CLOEXEC)) close(fd);
  environ = const_cast<char**>(environment);
  std::vector<std::string> words;
  for (char* const* word = arguments + 2; *word; ++word) words.emplace_back(*word);  // after PROGRAM --rank
  zr::test::skip_earlier_destructors();
  std::exit(zr::test::run_rank_body(words));
}
