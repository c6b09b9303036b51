#include "cli/bounded_run.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "base/text.hpp"

namespace zr::host::cli {

namespace {
using Clock = std::chrono::steady_clock;
constexpr std::size_t kMaxErrorText = 64u << 10;
constexpr auto kSilence = std::chrono::seconds(2);  // the longest wait without a word
}  // namespace

BoundedRun::BoundedRun(const ProcessOptions& options, std::size_t max_output)
    : max_output_(max_output), process_(start_process(options)), pipes_{process_.out, process_.err} {
  for (const int pipe : pipes_)
    if (pipe >= 0) ::fcntl(pipe, F_SETFL, O_NONBLOCK);
}

BoundedRun::~BoundedRun() {
  for (const int pipe : pipes_)
    if (pipe >= 0) ::close(pipe);
  if (exit_status_) return;  // reap() has killed the process group
  ::kill(-process_.pid, SIGKILL);
  while (!reap(process_.pid)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

BoundedRun::End BoundedRun::wait(double seconds, const std::string& what) {
  auto notice = Clock::now() + kSilence;
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  while (!(exit_status_ = reap(process_.pid))) {
    const auto now = Clock::now();
    if (now >= notice) {
      log(ZR_LOG_INFO, fmt::format("waiting for {}, for at most {} s", what, shortest(seconds)));
      notice = Clock::time_point::max();
    }
    if (now >= until) return End::timed_out;
    read_some(20);
    if (text_[0].size() > max_output_) return End::output_too_long;
  }
  while (read_some(0) && text_[0].size() <= max_output_) {
  }
  return text_[0].size() > max_output_ ? End::output_too_long : End::completed;
}

// Reads what is available, after waiting at most this long. Returns true if it read anything.
bool BoundedRun::read_some(int milliseconds) {
  std::array<pollfd, 2> waits{pollfd{pipes_[0], POLLIN, 0}, pollfd{pipes_[1], POLLIN, 0}};
  if (pipes_[0] < 0 && pipes_[1] < 0) milliseconds = std::min(milliseconds, 1);
  ::poll(waits.data(), waits.size(), milliseconds);
  bool any = false;
  for (std::size_t i = 0; i < waits.size(); ++i) {
    if (pipes_[i] < 0 || !waits[i].revents) continue;
    std::array<char, 65536> buffer;
    const ssize_t bytes_read = ::read(pipes_[i], buffer.data(), buffer.size());
    if (bytes_read > 0) {
      any = true;
      text_[i].append(buffer.data(), static_cast<std::size_t>(bytes_read));
      if (i == 1 && text_[1].size() > 2 * kMaxErrorText) text_[1].erase(0, text_[1].size() - kMaxErrorText);
    } else if (bytes_read == 0 || (errno != EAGAIN && errno != EINTR)) {
      ::close(std::exchange(pipes_[i], -1));
    }
  }
  return any;
}

}  // namespace zr::host::cli
