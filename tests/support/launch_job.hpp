// Starts a program from a test, captures its output in files, and shares memory with its ranks (launch_page.hpp).
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/launch_page.hpp"

namespace zr::test {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Environment = std::vector<std::pair<std::string, std::string>>;

inline std::string zeroth() { return std::string(ZR_BUILD_DIR) + "/bin/zeroth"; }
inline std::string rank_program() { return std::string(ZR_BUILD_DIR) + "/tests/launch_rank"; }

/// A temporary folder with the file of the shared page; the destructor removes it.
class Scene {
 public:
  Scene() {
    std::string name = std::filesystem::temp_directory_path() / "zr_launch_XXXXXX";
    if (!mkdtemp(name.data())) throw std::runtime_error("cannot create a temporary folder");
    folder_ = name;
    page_ = map_page(page_file());
  }
  ~Scene() {
    munmap(page_, sizeof(Page));
    std::filesystem::remove_all(folder_);
  }
  Scene(const Scene&) = delete;
  Page& page() { return *page_; }
  std::string page_file() const { return folder_ / "page"; }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::filesystem::path folder_;
  Page* page_;
};

/// Waits at most `patience` until `what` returns true; returns whether it did.
inline bool eventually(const std::function<bool()>& what, milliseconds patience = milliseconds(60000)) {
  for (const auto end = Clock::now() + patience; Clock::now() < end; std::this_thread::sleep_for(milliseconds(1)))
    if (what()) return true;
  return what();
}

inline char process_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text, '\0');  // fails if the process ends between open and read; an istream iterator would throw
  const auto end = text.rfind(')');
  return end == std::string::npos ? char{0} : text[end + 2];
}
inline bool gone(pid_t pid) {
  const char state = process_state(pid);
  return state == 0 || state == 'Z' || state == 'X';
}

/// An environment variable with which the process was started, or "".
inline std::string variable_of(pid_t pid, const std::string& name) {
  std::ifstream environment("/proc/" + std::to_string(pid) + "/environ");
  for (std::string one; std::getline(environment, one, '\0');)
    if (one.rfind(name + "=", 0) == 0) return one.substr(name.size() + 1);
  return "";
}

/// The pids of a launcher's ranks, ordered by rank, without ranks that have ended.
inline std::vector<pid_t> ranks_of(pid_t launcher) {
  std::map<int, pid_t> found;
  std::error_code error;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/" + std::to_string(launcher) + "/task", error)) {
    std::ifstream children(thread.path() / "children");
    for (pid_t pid; children >> pid;)
      if (const std::string rank = variable_of(pid, "ZR_RANK"); !rank.empty()) found[std::stoi(rank)] = pid;
  }
  std::vector<pid_t> pids;
  for (const auto& [rank, pid] : found) pids.push_back(pid);
  return pids;
}

class Job {
 public:
  Job(Scene& scene, const std::vector<std::string>& argv, Environment environment = {}) {
    static int number = 0;
    const std::string base = scene.folder() / ("job" + std::to_string(++number));
    out_ = base + ".out";
    err_ = base + ".err";
    environment.emplace_back("ZR_TEST_PAGE", scene.page_file());
    pid_ = fork();
    if (pid_ == 0) {
      const int out = open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
      const int err = open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
      dup2(out, 1);
      dup2(err, 2);
      for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
      std::vector<char*> arguments;
      for (const auto& text : argv) arguments.push_back(const_cast<char*>(text.c_str()));
      arguments.push_back(nullptr);
      execvp(arguments[0], arguments.data());
      _exit(127);
    }
  }
  ~Job() {
    if (!code_) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  Job(const Job&) = delete;
  pid_t pid() const { return pid_; }
  /// The exit code, 128 + the signal number, or -1 if the program has not ended within `patience`.
  int wait(milliseconds patience = milliseconds(20000)) {
    int status = 0;
    if (!code_ && eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, patience))
      code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return code_.value_or(-1);
  }
  std::string out() const { return text(out_); }
  std::string err() const { return text(err_); }

 private:
  static std::string text(const std::string& file) {
    std::ifstream stream(file);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  pid_t pid_;
  std::optional<int> code_;
  std::string out_, err_;
};

/// The command line of `zeroth launch` with any program.
inline std::vector<std::string> launch_of(int ranks, std::vector<std::string> program) {
  program.insert(program.begin(), {zeroth(), "launch", "-n", std::to_string(ranks), "--"});
  return program;
}
/// The command line of `zeroth launch` with launch_rank and these options.
inline std::vector<std::string> launched(int ranks, std::vector<std::string> options) {
  options.insert(options.begin(), rank_program());
  return launch_of(ranks, std::move(options));
}

}  // namespace zr::test
