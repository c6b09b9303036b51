#include "cli/launch.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/ip/address_v4.hpp>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>

#include "base/cores.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/terminal.hpp"
#include "cli/job_loop.hpp"
#include "cli/program_libraries.hpp"
#include "control/control.hpp"
#include "control/environment.hpp"
#include "control/step_board.hpp"

extern char** environ;

namespace zr::host::cli {

using boost::system::error_code;

namespace {
constexpr int kMaxRanks = 1024;
constexpr auto kShutdownTimeout = std::chrono::seconds(5);               // after a signal of the user; then SIGKILL
constexpr auto kFailureReportTimeout = std::chrono::milliseconds(3500);  // until the store's report, after a failure
constexpr auto kSurvivorTimeout = std::chrono::milliseconds(2500);       // after the report; ranks end within 2 s
constexpr auto kContinuationTimeout = std::chrono::minutes(10);          // of programs that continue after the failure

// ZR_PROGRESS of the ranks: what this process's standard output is. Their own is a pipe. mpirun gives its first process
// a terminal, also if its own output is a file.
std::string progress_mode() {
  if (!is_terminal(STDOUT_FILENO) || std::getenv("OMPI_COMM_WORLD_RANK")) return "plain";
  char device[PATH_MAX];
  return ::ttyname_r(STDOUT_FILENO, device, sizeof device) == 0 ? std::string("tty:") + device : "tty";
}

class Launch : JobLoop {
 public:
  explicit Launch(const LaunchOptions& options);
  ~Launch() override;
  int run();

 private:
  struct Rank {
    Process process;                          // the one that was started, or the rank that has outlived it
    bool running = false, signalled = false;  // signalled: by this launcher, so its end is not a failure
    std::array<Pipe, 2> pipes;
  };
  void on_signal(int signal) override;
  void on_child() override;
  void on_tick() override { save_after_all(); }
  void on_failure(const std::string& table) override;
  bool is_done() const override { return running_ == 0 && (!store_->broken() || reported_); }

  std::vector<std::string> environment_of(int rank) const;
  void start_rank(int rank, const std::string& file);
  void ended(int rank, const control::ExitStatus& exit_status);
  bool saves_on_signal() const { return all_set(control::saves_on_signal_key); }
  bool outlives(int rank, const control::ExitStatus& exit_status);
  void save_after_all();
  void signal_ranks(int signal, bool joined_too);
  void kill_all_after(std::chrono::milliseconds timeout);
  void end_survivors();
  Rank& at(int rank) { return *all_[static_cast<std::size_t>(rank)]; }

  const LaunchOptions& options_;
  const UsableCores cores_ = usable_cores();
  std::unique_ptr<control::StepBoard> steps_;
  std::vector<std::unique_ptr<Rank>> all_;
  int running_ = 0;
  bool stop_requested_ = false;  // a signal was forwarded; the ranks save a checkpoint and end by themselves
  bool sigkill_sent_ = false;    // SIGKILL was sent
  bool survivors_may_continue_ = true;
  int exit_code_ = 0;                 // exit code of the first failure
  bool code_is_consequence_ = false;  // exit_code_ is from a rank that failed only because another rank was lost
  const long oom_kills_ = kernel_oom_kills();
};

Launch::Launch(const LaunchOptions& options)
    : JobLoop(options.ranks, options.raw_rank0),
      options_(options),
      steps_(control::StepBoard::create(job_, options.ranks)) {}

Launch::~Launch() {
  for (auto& rank : all_)
    if (rank->running) {
      kill(-rank->process.group, SIGKILL);
      while (!reap(rank->process.pid, rank->process.group)) usleep(1000);
    }
}

std::vector<std::string> Launch::environment_of(int rank) const {
  const int threads = options_.threads > 0 ? options_.threads : std::max(1, cores_.whole() / options_.ranks);
  std::vector<std::pair<std::string, std::string>> added{{"ZR_RANK", std::to_string(rank)},
                                                         {"ZR_WORLD", std::to_string(options_.ranks)},
                                                         {"ZR_LOCAL_RANK", std::to_string(rank)},
                                                         {"ZR_LOCAL_WORLD", std::to_string(options_.ranks)},
                                                         {"ZR_STORE", fmt::format("127.0.0.1:{}", store_->port())},
                                                         {"ZR_JOB", job_},
                                                         {"ZR_TOKEN", token_},
                                                         {"ZR_THREADS", std::to_string(threads)}};
  if (!std::getenv("OMP_NUM_THREADS")) added.emplace_back("OMP_NUM_THREADS", std::to_string(threads));
  if (steps_) added.emplace_back(control::kStepBoardVariable, std::to_string(steps_->descriptor()));
  if (!std::getenv("ZR_PROGRESS")) added.emplace_back("ZR_PROGRESS", progress_mode());
  added.insert(added.end(), options_.environment.begin(), options_.environment.end());
  std::set<std::string> names;
  std::vector<std::string> environment;
  for (auto entry = added.rbegin(); entry != added.rend(); ++entry)  // the last value of a name wins
    if (names.insert(entry->first).second) environment.push_back(fmt::format("{}={}", entry->first, entry->second));
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry, name = text.substr(0, text.find('='));
    if (!control::tells_own_rank(std::getenv, name) && names.insert(name).second) environment.push_back(text);
  }
  return environment;
}

void Launch::start_rank(int rank, const std::string& file) {
  ProcessOptions process;
  process.file = file;
  process.arguments = options_.program;
  process.environment = environment_of(rank);
  process.reads_stdin = rank == 0 && !isatty(STDIN_FILENO);  // a background group that reads a terminal is stopped
  process.one_pipe = output_.merged();
  all_.push_back(std::make_unique<Rank>());
  Rank& started = *all_.back();
  started.process = start_process(process);
  started.running = true;
  ++running_;
  store_->started(rank, started.process.pid);
  const std::array ends{started.process.out, started.process.err};
  for (const auto stream : {Output::out, Output::err})
    if (ends[stream] >= 0)
      started.pipes[stream].open(*this, ends[stream],
                                 [=, this](std::string_view bytes) { output_.bytes(rank, stream, bytes); });
}

int Launch::run() {
  const std::string file = find_program(options_.program.empty() ? "" : options_.program[0]);
  provide_libraries(file);
  open_store(boost::asio::ip::address_v4::loopback(), {0}, true);
  listen_to_signals();
  if (options_.threads == 0 && cores_.limited())
    log(ZR_LOG_INFO, fmt::format("{}: {} threads per rank; set job.threads for another number", quota_text(cores_),
                                 std::max(1, cores_.whole() / options_.ranks)));
  for (int rank = 0; rank < options_.ranks; ++rank) start_rank(rank, file);
  run_loop();
  if (finish_output() && (stop_signal_ == SIGPIPE || !exit_code_)) return exit_code::environment;
  return exit_code_ ? exit_code_ : stop_signal_ ? 128 + stop_signal_ : 0;
}

void Launch::on_child() {
  std::set<pid_t> own;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (!at(rank).running) continue;
    std::optional<control::ExitStatus> exit_status;
    pid_t pid = 0;
    do {  // again if the rank outlives the process: it may have ended meanwhile
      pid = at(rank).process.pid;
      exit_status =
          reap(pid, at(rank).process.group, [&](const control::ExitStatus& status) { return outlives(rank, status); });
    } while (exit_status && at(rank).process.pid != pid);
    if (exit_status)
      ended(rank, *exit_status);
    else
      own.insert(pid);
  }
  orphans_.reap_others(own);
  finish_if_done();
}

// A signal has ended the process that this launcher has started, such as a shell, but the rank, which that process has
// started, saves a checkpoint after such a signal. Then the rank gets the signal too, and is waited for instead.
bool Launch::outlives(int rank, const control::ExitStatus& exit_status) {
  Process& process = at(rank).process;
  const auto inner = static_cast<pid_t>(store_->process_of(rank));
  const bool saves = (exit_status.signal == SIGTERM || exit_status.signal == SIGINT) && !sigkill_sent_ &&
                     store_->value(control::saves_on_signal_key(rank)) == "yes";
  siginfo_t info{};
  const auto is_child = [&] {  // the launcher has become its parent
    return waitid(P_PID, static_cast<id_t>(inner), &info, WEXITED | WNOHANG | WNOWAIT) == 0;
  };
  if (!saves || inner == 0 || inner == process.pid || !is_child()) return false;
  process.pid = inner;
  if (const pid_t group = getpgid(inner); group > 0) process.group = group;  // the shell may have made one for it
  kill(inner, exit_status.signal);
  return true;
}

void Launch::ended(int rank, const control::ExitStatus& seen) {
  save_after_all();
  control::ExitStatus exit_status = seen;
  if (steps_) exit_status.step = steps_->step(rank);
  at(rank).running = false;
  --running_;
  for (Pipe& pipe : at(rank).pipes) pipe.drain();
  output_.ended(rank);
  if (exit_status.signal == SIGKILL && oom_kills_ >= 0 && kernel_oom_kills() > oom_kills_)
    exit_status.note =
        "the kernel has killed processes for lack of memory (dmesg lists them): lower train.micro_batch or job.ranks";
  if (at(rank).signalled) return;
  if (!exit_status.good()) {
    const int code = exit_status.signal ? exit_code::peer_lost : exit_status.code;
    const bool follows = !exit_status.signal && code == exit_code::peer_lost;
    if (exit_code_ == 0 || (code_is_consequence_ && !follows)) {
      exit_code_ = code;
      code_is_consequence_ = follows;
    }
    output_.failed();
    if (!reported_) kill_all_after(kFailureReportTimeout);
  }
  store_->ended(rank, at(rank).process.pid, exit_status);
  if (!exit_status.good()) signal_ranks(SIGTERM, false);  // the store cannot notify ranks that have not joined
}

void Launch::on_failure(const std::string& table) {
  report(table);
  if (exit_code_ == 0) {
    exit_code_ = exit_code::peer_lost;
    code_is_consequence_ = true;
  }
  kill_all_after(kSurvivorTimeout);
  finish_if_done();
}

// Stops the job.
void Launch::on_signal(int signal) {
  if (stop_signal_ || stop_requested_) {  // the second signal
    if (!stop_signal_) stop_signal_ = signal;
    store_->stop_failure_detection();
    return signal_ranks(SIGKILL, true);
  }
  if ((signal == SIGTERM || signal == SIGINT) && saves_on_signal()) {
    stop_requested_ = true;  // the ranks save a checkpoint and end; there is no time limit
    if (all_set(control::stops_on_request_key)) return store_->request_stop(signal);
    for (const auto& rank : all_)
      if (rank->running) kill(-rank->process.group, signal);
    return;
  }
  stop_signal_ = signal;
  store_->stop_failure_detection();
  signal_ranks(signal == SIGPIPE ? SIGTERM : signal, true);
  signal_ranks(SIGCONT, true);
  kill_all_after(kShutdownTimeout);
}

// Handles a signal that arrived after every rank had begun to catch it, but before the store knew: the ranks save.
void Launch::save_after_all() {
  if ((stop_signal_ != SIGTERM && stop_signal_ != SIGINT) || sigkill_sent_ || running_ < options_.ranks ||
      !saves_on_signal())
    return;
  stop_requested_ = true;
  stop_signal_ = 0;
  deadline_.expires_at({});  // cancels the deadline
  for (auto& rank : all_) rank->signalled = false;
  store_->resume_failure_detection();
}

void Launch::signal_ranks(int signal, bool joined_too) {
  sigkill_sent_ |= signal == SIGKILL;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (!at(rank).running || (!joined_too && store_->joined(rank))) continue;
    at(rank).signalled = true;
    kill(-at(rank).process.group, signal);
  }
}

void Launch::kill_all_after(std::chrono::milliseconds timeout) {
  const auto when = std::chrono::steady_clock::now() + timeout;
  if (deadline_.expiry() != decltype(deadline_)::time_point{} && deadline_.expiry() <= when) return;
  deadline_.expires_at(when);
  deadline_.async_wait([this](const error_code& error) {
    if (!error) stop_signal_ ? signal_ranks(SIGKILL, true) : end_survivors();
  });
}

// Ends the ranks that are left of a failed job. Those whose programs may continue, as the store says, get more time,
// once.
void Launch::end_survivors() {
  std::string continuing;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (!at(rank).running) continue;
    if (!survivors_may_continue_ || store_->value(control::continues_after_failure_key(rank)) != "yes") {
      at(rank).signalled = true;
      kill(-at(rank).process.group, SIGKILL);
    } else {
      continuing += fmt::format("{}{}", continuing.empty() ? "" : ", ", rank);
    }
  }
  survivors_may_continue_ = false;
  if (continuing.empty()) return;
  output_.error(fmt::format(
      "the program may continue after the failure of the job on these ranks: {}; the launcher ends them in {} minutes",
      continuing, kContinuationTimeout.count()));
  deadline_.expires_at({});
  kill_all_after(kContinuationTimeout);
}
}  // namespace

int launch(const LaunchOptions& options) {
  control::check_launched_once(std::getenv, ::getpid());
  if (options.ranks < 1 || options.ranks > kMaxRanks)
    fail_user(fmt::format("zeroth launch: {} ranks: must be from 1 to {} per node", options.ranks, kMaxRanks));
  return Launch(options).run();
}

}  // namespace zr::host::cli
