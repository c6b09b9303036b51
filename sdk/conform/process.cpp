#include "conform/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>  // sigabbrev_np
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <system_error>
#include <vector>

#include "conform/case.hpp"
#include "conform/text.hpp"

namespace zr::conform {

namespace {
using Clock = std::chrono::steady_clock;

// A message is a letter (n: note, p: pass, f: fail, s: skip), a text, and a zero byte. Short messages of several
// processes do not mix.
void send(int fd, char kind, const std::string& text) {
  std::string message = kind + text;
  message += '\0';
  for (std::size_t sent = 0; sent < message.size();) {
    const ssize_t n = ::write(fd, message.data() + sent, message.size() - sent);
    if (n <= 0 && errno != EINTR) return;
    if (n > 0) sent += static_cast<std::size_t>(n);
  }
}

// Runs fn, sends its result, and ends the process.
[[noreturn]] void end_with_result(int result, pid_t parent, const std::function<std::string()>& fn) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  try {
    send(result, 'p', fn());
  } catch (const Failure& failure) {
    send(result, 'f', one_line(failure.reason));
  } catch (const Skipped& skipped) {
    send(result, 's', one_line(skipped.reason));
  } catch (const std::exception& error) {
    send(result, 'f', one_line(concat("the check ended with an exception: ", error.what())));
  }
  ::_exit(0);
}

[[noreturn]] void run_child(const std::function<std::string(const Note&)>& check, int result, int errors,
                            pid_t parent) {
  ::setpgid(0, 0);
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_CORE, &none);
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int standard : {0, 1}) ::dup2(null, standard);
  ::dup2(errors, 2);
  for (const int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) ::signal(crash, SIG_DFL);
  end_with_result(result, parent,
                  [&] { return check([result](const std::string& text) { send(result, 'n', one_line(text)); }); });
}

constexpr const char* kCrashed = "it crashed with signal ";

std::string status_text(int status) {
  if (WIFEXITED(status)) return concat("it ended the process with exit code ", WEXITSTATUS(status));
  const char* name = ::sigabbrev_np(WTERMSIG(status));
  return concat(kCrashed, WTERMSIG(status), name ? concat(" (SIG", name, ")") : "");
}

bool has_ended(pid_t child) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == child;
}

// Reads messages until the result has arrived, the child has ended or the time is over.
class Messages {
 public:
  /// `errors`: what the process writes to stderr; or -1.
  explicit Messages(int fd, int errors = -1) : fd_(fd), errors_(errors) {}
  bool wait(pid_t child, Clock::time_point deadline) {
    bool ended = false;
    while (result_.empty() && !ended && Clock::now() < deadline) {
      ended = has_ended(child);  // then its messages are in the pipe
      std::array<pollfd, 2> polls{pollfd{fd_, POLLIN, 0}, pollfd{errors_, POLLIN, 0}};
      while (result_.empty() && ::poll(polls.data(), polls.size(), ended ? 0 : 20) > 0) {
        const bool has_errors = read_errors();
        if (!read() && !has_errors) break;
        if (Clock::now() > deadline) break;
      }
    }
    while (read_errors() && Clock::now() < deadline) {
    }
    return ended || !result_.empty();
  }
  const std::string& result() const { return result_; }
  std::string while_text() const { return note_.empty() ? "" : concat(" (while: ", note_, ")"); }
  // The last lines that the process wrote to stderr.
  std::string errors_text() const {
    constexpr std::size_t kLines = 5, kBytes = 240;
    std::string text = error_text_.substr(error_text_.size() - std::min(error_text_.size(), kBytes));
    while (!text.empty() && text.back() == '\n') text.pop_back();
    std::size_t first = text.size();
    for (std::size_t line = 0; line < kLines && first != text.npos && first > 0; ++line)
      first = text.rfind('\n', first - 1);
    if (first != text.npos && first > 0) text.erase(0, first + 1);
    std::string line = "; its last lines on stderr: ";
    for (const char c : text) line += c == '\n' ? std::string(" / ") : std::string(1, c);
    return text.empty() ? "" : one_line(line);
  }

 private:
  bool read_errors() {
    constexpr std::size_t kKept = 4096;
    std::array<char, 4096> buffer;
    const ssize_t n = errors_ < 0 ? -1 : ::read(errors_, buffer.data(), buffer.size());
    if (n == 0) errors_ = -1;  // it closed stderr
    if (n <= 0) return false;
    error_text_.append(buffer.data(), static_cast<std::size_t>(n));
    if (error_text_.size() > kKept) error_text_.erase(0, error_text_.size() - kKept);
    return true;
  }
  // False if there is nothing to read.
  bool read() {
    std::array<char, 4096> buffer;
    const ssize_t n = fd_ < 0 ? -1 : ::read(fd_, buffer.data(), buffer.size());
    if (n == 0) fd_ = -1;  // it closed all file descriptors, or has ended
    if (n <= 0) return false;
    text_.append(buffer.data(), static_cast<std::size_t>(n));
    for (std::size_t end = text_.find('\0'); end != text_.npos; end = text_.find('\0')) {
      (text_[0] == 'n' ? note_ : result_) = text_.substr(text_[0] == 'n' ? 1 : 0, text_[0] == 'n' ? end - 1 : end);
      text_.erase(0, end + 1);
    }
    return true;
  }
  int fd_, errors_;
  std::string text_, note_, result_, error_text_;
};

Outcome outcome_of(const std::string& result) {
  const Verdict verdict = result[0] == 'p' ? Verdict::pass : result[0] == 's' ? Verdict::skip : Verdict::fail;
  const std::string text = result.substr(1);
  return verdict == Verdict::pass ? Outcome{verdict, "", text} : Outcome{verdict, text, ""};
}

}  // namespace

Outcome run_in_process(const std::function<std::string(const Note&)>& check, double seconds) {
  std::array<int, 2> ends{}, errors{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  if (::pipe2(errors.data(), O_CLOEXEC) != 0) {
    const int code = errno;
    ::close(ends[0]), ::close(ends[1]);
    throw std::system_error(code, std::generic_category(), "pipe");
  }
  const pid_t parent = ::getpid(), child = ::fork();
  if (child == 0) {
    ::close(ends[0]), ::close(errors[0]);
    run_child(check, ends[1], errors[1], parent);
  }
  ::close(ends[1]), ::close(errors[1]);
  if (child < 0) {
    ::close(ends[0]), ::close(errors[0]);
    throw std::system_error(errno, std::generic_category(), "fork");
  }
  ::setpgid(child, child);
  for (const int end : {ends[0], errors[0]}) ::fcntl(end, F_SETFL, O_NONBLOCK);
  Messages messages(ends[0], errors[0]);
  const bool ended = messages.wait(
      child, Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
  int status = 0;
  // A child without a result that has closed its end is about to end; one with a result is not needed any more.
  if (!ended || !messages.result().empty()) ::kill(-child, SIGKILL), ::kill(child, SIGKILL);
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  ::kill(-child, SIGKILL);  // its processes
  ::close(ends[0]), ::close(errors[0]);
  if (!messages.result().empty()) {
    Outcome outcome = outcome_of(messages.result());
    if (outcome.verdict == Verdict::fail && outcome.reason.find(kCrashed) != std::string::npos)  // a rank
      outcome.reason += messages.errors_text();
    return outcome;
  }
  const std::string how = ended ? status_text(status) : concat("it did not end within ", seconds, " seconds");
  return {Verdict::fail, how + messages.while_text() + messages.errors_text(), ""};
}

namespace {
struct RankProcess {
  pid_t pid = -1;
  int fd = -1;
  std::unique_ptr<Messages> messages;
};

// The result of the rank, or how it ended; nothing if it still runs.
std::optional<Outcome> outcome_of(const RankProcess& rank) {
  if (!rank.messages->wait(rank.pid, Clock::now() + std::chrono::milliseconds(1))) return {};
  if (!rank.messages->result().empty()) return outcome_of(rank.messages->result());
  int status = 0;
  ::waitpid(rank.pid, &status, 0);
  return Outcome{Verdict::fail, status_text(status), ""};
}
}  // namespace

void run_ranks(int world, const std::function<void(int rank)>& body) {
  std::vector<RankProcess> ranks(static_cast<std::size_t>(world));
  const pid_t parent = ::getpid();
  for (int r = 0; r < world; ++r) {
    RankProcess& rank = ranks[static_cast<std::size_t>(r)];
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) fail("the machine has no pipe for a rank");
    rank.pid = ::fork();
    if (rank.pid == 0) end_with_result(ends[1], parent, [&] { return body(r), std::string(); });
    ::close(ends[1]);
    if (rank.pid < 0) fail("the machine has no process for a rank");
    rank.fd = ends[0];
    rank.messages = std::make_unique<Messages>(rank.fd);
  }
  std::optional<Outcome> first;  // of a rank that did not pass
  std::string name;
  for (std::vector<bool> over(ranks.size()); !first && std::count(over.begin(), over.end(), false) > 0;)
    for (std::size_t r = 0; r < ranks.size() && !first; ++r) {
      if (over[r]) continue;
      const auto outcome = outcome_of(ranks[r]);
      over[r] = outcome.has_value();
      if (outcome && outcome->verdict != Verdict::pass) first = outcome, name = concat("rank ", r, " of ", world, ": ");
    }
  for (const RankProcess& rank : ranks) {
    ::kill(rank.pid, SIGKILL);
    ::waitpid(rank.pid, nullptr, 0);
    ::close(rank.fd);
  }
  if (first && first->verdict == Verdict::skip) throw Skipped{first->reason};
  if (first) throw Failure{name + first->reason};
}

}  // namespace zr::conform
