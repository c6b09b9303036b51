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
#include "base/log.hpp"
#include "base/seconds_variable.hpp"
#include "base/text.hpp"

namespace zr::host::plugin {

namespace {
using Clock = std::chrono::steady_clock;
constexpr double kDefaultSeconds = 20;
constexpr std::size_t kMaxOutput = 4096;  // the end of the output of the child
constexpr char kSurvived = 'a';
constexpr int kUnknownStatus = -1;  // the child ended, but its status is unknown

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
  for (const int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
    ::signal(crash, SIG_DFL);  // not the parent's handlers
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

// The process that loads the plug-in; ended by the destructor at the latest.
class Child {
 public:
  explicit Child(const std::function<void()>& load) {
    for (const int end : {answer_.read, output_.read}) ::fcntl(end, F_SETFL, O_NONBLOCK);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ == 0) run_child(load, answer_, output_, parent);
    if (pid_ < 0)
      fail_environment(
          fmt::format("cannot start a process to try a plug-in: {}; raise the limit of processes (ulimit -u)",
                      std::strerror(errno)));
    ::setpgid(pid_, pid_);
    answer_.close_write();
    output_.close_write();
  }
  Child(const Child&) = delete;
  ~Child() { end(); }

  /// Waits until the child has loaded the plug-in or has ended, but not longer than until `deadline`. After 2 s, logs
  /// what it waits for.
  void wait_until(Clock::time_point deadline, const std::string& what) {
    auto notice = what.empty() ? Clock::time_point::max() : Clock::now() + std::chrono::seconds(2);
    bool answers = true;  // the child has not closed its end
    while (answer_text_.empty() && !status_ && Clock::now() < deadline) {
      if (Clock::now() > notice) {
        notice = Clock::time_point::max();
        log(ZR_LOG_INFO, fmt::format("waiting for {} to load (ZR_PLUGIN_LOAD_SECONDS sets the limit)", what));
      }
      std::array<pollfd, 2> waits{pollfd{answers ? answer_.read : -1, POLLIN, 0},
                                  pollfd{prints_ ? output_.read : -1, POLLIN, 0}};
      ::poll(waits.data(), waits.size(), 20);
      if (waits[1].revents) prints_ = read_some(output_.read, printed_);
      if (waits[0].revents) answers = read_some(answer_.read, answer_text_);
      if (answer_text_.empty()) status_ = exit_status_of(pid_);
      if (status_) read_some(answer_.read, answer_text_);  // it may have answered before it ended
    }
  }
  /// Kills the child if it has not ended.
  void end() {
    if (status_ || pid_ < 0) return;
    ::kill(-pid_, SIGKILL);
    ::kill(pid_, SIGKILL);  // it may have left its group
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
  }
  bool survived() const { return !answer_text_.empty(); }     // the plug-in was loaded
  std::optional<int> exit_status() const { return status_; }  // nothing if the child had not ended
  /// The last line that the child printed.
  std::string last_printed_line() {
    std::array<pollfd, 1> remaining{pollfd{output_.read, POLLIN, 0}};
    for (int reads = 0; prints_ && reads < 64 && ::poll(remaining.data(), 1, 0) > 0; ++reads)
      prints_ = read_some(output_.read, printed_);
    return last_line(printed_);
  }

 private:
  Pipe answer_, output_;
  pid_t pid_ = -1;
  std::string answer_text_, printed_;
  bool prints_ = true;  // the output is open
  std::optional<int> status_;
};

}  // namespace

std::string probe_problem(const std::function<void()>& load, RejectionCause* cause, const std::string& what) {
  const double seconds = seconds_of_variable("ZR_PLUGIN_LOAD_SECONDS", kDefaultSeconds);
  Child child(load);
  child.wait_until(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)),
                   what);
  child.end();
  if (child.survived()) return "";
  const std::string line = child.last_printed_line();
  const std::optional<int> status = child.exit_status();
  if (cause) *cause = status ? RejectionCause::crashed : RejectionCause::timed_out;
  return (status ? fmt::format("its code {} while it was being loaded", exit_status_text(*status))
                 : fmt::format("it did not finish loading within {} seconds", shortest(seconds))) +
         (line.empty() ? "" : fmt::format(" (it printed: {})", line)) +
         (status ? "; remove it, or rebuild it for this machine"
                 : "; remove it, or set ZR_PLUGIN_LOAD_SECONDS to more seconds");
}

}  // namespace zr::host::plugin
