#include "plugin/probe.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/error.hpp"
#include "base/text.hpp"

namespace zr::host::plugin {

namespace {
using Clock = std::chrono::steady_clock;
constexpr double kDefaultSeconds = 20, kMaxSeconds = 86400;
constexpr std::size_t kMaxOutput = 4096;  // the end of the output of the child
constexpr char kSurvived = 'a';
constexpr int kUnknownStatus = -1;  // the child ended, but its status is unknown

double limit_seconds() {
  const char* variable = ::secure_getenv("ZR_PLUGIN_LOAD_SECONDS");
  if (!variable) return kDefaultSeconds;
  char* end = nullptr;
  const double seconds = std::strtod(variable, &end);
  if (end == variable || *end || !(seconds > 0) || seconds > kMaxSeconds)
    fail_user(fmt::format("ZR_PLUGIN_LOAD_SECONDS={}: expected seconds, more than 0 and at most 86400", variable));
  return seconds;
}

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0)
      fail_environment(std::string("cannot open a pipe to try a plug-in: ") + std::strerror(errno));
    read = ends[0];
    write = ends[1];
  }
  Pipe(const Pipe&) = delete;
  ~Pipe() {
    ::close(read);
    if (write >= 0) ::close(write);
  }
  void close_write() {
    ::close(write);
    write = -1;
  }
};

[[noreturn]] void run_child(const std::function<void()>& load, const Pipe& answer, const Pipe& output, pid_t parent) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_CORE, &none);
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null >= 0) ::dup2(null, 0);
  ::dup2(output.write, 1);
  ::dup2(output.write, 2);
  try {
    load();
  } catch (...) {
  }
  [[maybe_unused]] const auto written = ::write(answer.write, &kSurvived, 1);
  ::_exit(0);
}

// False if the other end is closed.
bool read_some(int fd, std::string& text) {
  std::array<char, 4096> buffer;
  const ssize_t bytes_read = ::read(fd, buffer.data(), buffer.size());
  if (bytes_read <= 0) return bytes_read < 0 && (errno == EAGAIN || errno == EINTR);
  text.append(buffer.data(), static_cast<std::size_t>(bytes_read));
  if (text.size() > kMaxOutput) text.erase(0, text.size() - kMaxOutput);
  return true;
}

std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  const auto line = text.rfind('\n');
  return printable(line == text.npos ? text : text.substr(line + 1));
}

std::string exit_status_text(int status) {
  if (status == kUnknownStatus) return "ended the process";
  if (!WIFSIGNALED(status)) return fmt::format("ended the process with exit code {}", WEXITSTATUS(status));
  const char* name = ::sigabbrev_np(WTERMSIG(status));
  return fmt::format("crashed with signal {}{}", WTERMSIG(status), name ? fmt::format(" (SIG{})", name) : "");
}

// The status of the child if it has ended. The status is unknown if this process ignores SIGCHLD.
std::optional<int> exit_status_of(pid_t child) {
  int status = 0;
  const pid_t waited = ::waitpid(child, &status, WNOHANG);
  if (waited == child) return status;
  return waited < 0 && errno == ECHILD ? std::optional(kUnknownStatus) : std::nullopt;
}

}  // namespace

std::string probe_problem(const std::function<void()>& load) {
  const double seconds = limit_seconds();
  Pipe answer, output;
  for (const int end : {answer.read, output.read}) ::fcntl(end, F_SETFL, O_NONBLOCK);
  const pid_t parent = ::getpid(), child = ::fork();
  if (child == 0) run_child(load, answer, output, parent);
  if (child < 0)
    fail_environment(fmt::format(
        "cannot start a process to try a plug-in: {}; raise the limit of processes (ulimit -u)", std::strerror(errno)));
  ::setpgid(child, child);
  answer.close_write();
  output.close_write();
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::string answer_text, printed;
  bool open = true, prints = true;
  std::optional<int> status;
  while (answer_text.empty() && !status && Clock::now() < deadline) {
    std::array<pollfd, 2> waits{pollfd{open ? answer.read : -1, POLLIN, 0},
                                pollfd{prints ? output.read : -1, POLLIN, 0}};
    ::poll(waits.data(), waits.size(), 20);
    if (waits[1].revents) prints = read_some(output.read, printed);
    if (waits[0].revents) open = read_some(answer.read, answer_text);
    if (answer_text.empty()) status = exit_status_of(child);
    if (status) read_some(answer.read, answer_text);  // it may have answered before it ended
  }
  const bool in_time = status.has_value() || !answer_text.empty();
  if (!status) {
    ::kill(-child, SIGKILL);
    ::kill(child, SIGKILL);  // it may have left its group
    while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  if (!answer_text.empty()) return "";
  std::array<pollfd, 1> remaining{pollfd{output.read, POLLIN, 0}};
  for (int reads = 0; prints && reads < 64 && ::poll(remaining.data(), 1, 0) > 0; ++reads)
    prints = read_some(output.read, printed);
  const std::string line = last_line(printed);
  return (in_time ? fmt::format("its code {} while it was being loaded", exit_status_text(*status))
                  : fmt::format("it did not finish loading within {} seconds", shortest(seconds))) +
         (line.empty() ? "" : fmt::format(" (it printed: {})", line)) +
         (in_time ? "; remove it, or rebuild it for this machine"
                  : "; remove it, or set ZR_PLUGIN_LOAD_SECONDS to more seconds");
}

}  // namespace zr::host::plugin
