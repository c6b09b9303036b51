#include "cli/job_loop.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/log.hpp"
#include "control/job_secret.hpp"

namespace zr::host::cli {

using boost::asio::posix::stream_descriptor;
using boost::system::error_code;

namespace {
constexpr auto kTickInterval = std::chrono::milliseconds(100);
}

void JobLoop::Pipe::open(JobLoop& loop, int fd, Take take) {
  fcntl(fd, F_SETFL, O_NONBLOCK);
  loop_ = &loop;
  take_ = std::move(take);
  from_ = std::make_unique<stream_descriptor>(loop.io_, fd);
  loop.pipes_.push_back(this);
  read();
}

void JobLoop::Pipe::resume() {
  if (from_ && std::exchange(paused_, false)) read();
}

// The result of read().
ssize_t JobLoop::Pipe::read_once() {
  std::vector<char>& buffer = loop_->buffer_;
  const ssize_t n = ::read(from_->native_handle(), buffer.data(), buffer.size());
  if (n > 0) take_({buffer.data(), static_cast<std::size_t>(n)});
  return n;
}

void JobLoop::Pipe::read() {
  if (loop_->writer_.congested()) {
    paused_ = true;  // tick() resumes it
    return;
  }
  from_->async_wait(stream_descriptor::wait_read, [this](const error_code& error) {
    if (error || !from_) return;
    const ssize_t n = read_once();
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
      from_.reset();
    else
      read();
  });
}

void JobLoop::Pipe::drain() {
  if (!from_) return;
  for (ssize_t n = 1; n > 0 || (n < 0 && errno == EINTR);) n = read_once();
  from_.reset();
}

JobLoop::JobLoop(int ranks, bool raw_rank0)
    : ranks_(ranks),
      deadline_(io_),
      output_(writer_, STDOUT_FILENO, STDERR_FILENO, ranks, raw_rank0),
      job_("zr-" + control::random_hex(6)),
      token_(control::random_hex(16)),
      signals_(io_),
      tick_(io_),
      buffer_(std::max<std::size_t>(65536, packet_bytes())) {
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &sigpipe_action_before_);
}

JobLoop::~JobLoop() { sigaction(SIGPIPE, &sigpipe_action_before_, nullptr); }

void JobLoop::open_store(const boost::asio::ip::address& address, const std::vector<uint16_t>& ports, bool launched) {
  control::Store::Options store;
  store.world = ranks_;
  store.job = store.job_id = job_;
  store.token = token_;
  store.launched = launched;
  store.on_failure_report = [this](const std::string& table) { on_failure(table); };
  store_ = std::make_unique<control::Store>(io_, std::move(store), address, ports);
}

void JobLoop::listen_to_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction now {};
    sigaction(signal, nullptr, &now);
    if (now.sa_handler != SIG_IGN) signals_.add(signal);  // nohup makes the launcher ignore SIGHUP
  }
  signals_.add(SIGCHLD);
  const auto wait = [this](const auto& again) -> void {
    signals_.async_wait([this, again](const error_code& error, int signal) {
      if (error) return;
      signal == SIGCHLD ? on_child() : on_signal(signal);
      again(again);
    });
  };
  wait(wait);
}

void JobLoop::run_loop() {
  writer_.start();
  tick();
  on_child();
  io_.run();
}

void JobLoop::tick() {
  output_.tick();
  on_tick();
  if (writer_.failed() && !stop_signal_) on_signal(SIGPIPE);
  for (Pipe* pipe : pipes_) pipe->resume();
  tick_.expires_after(kTickInterval);
  tick_.async_wait([this](const error_code& error) {
    if (!error) tick();
  });
}

void JobLoop::finish_if_done() {
  if (!is_done()) return;
  store_->close();
  io_.stop();
}

int JobLoop::finish_output() {
  error_code ignored;
  signals_.clear(ignored);  // now Ctrl-C ends the launcher even if its output blocks
  output_.finish();
  writer_.flush();
  const int error = writer_.error();
  if (error) log(ZR_LOG_ERROR, lost_output_text(error, stop_signal_ == SIGPIPE));
  return error;
}

void JobLoop::report(const std::string& table) {
  reported_ = true;
  output_.failed();
  output_.error(table);
}

bool JobLoop::all_set(std::string (*key)(int rank)) const {
  for (int rank = 0; rank < ranks_; ++rank)
    if (store_->value(key(rank)) != "yes") return false;
  return true;
}

}  // namespace zr::host::cli
