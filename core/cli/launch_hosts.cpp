#include "cli/launch_hosts.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string_view>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "cli/bounded_run.hpp"
#include "cli/job_loop.hpp"
#include "cli/tagged_output.hpp"
#include "control/control.hpp"
#include "control/environment.hpp"

extern char** environ;

namespace zr::host::cli {

using boost::system::error_code;

namespace {
constexpr auto kReportTimeout = std::chrono::milliseconds(3500);  // until the store's report, after a failure
constexpr auto kMpirunTimeout = std::chrono::seconds(5);          // until mpirun ends, after SIGTERM
constexpr auto kAbortTimeout = std::chrono::seconds(3);           // the same, after the failure report

std::string mpirun_file() {
  const char* path = std::getenv("PATH");
  for (const char* name : {"mpirun.openmpi", "mpirun"}) {
    try {
      return find_program(name);
    } catch (const UserError&) {
    }
  }
  fail_environment(
      fmt::format("zeroth launch --hosts needs mpirun, which is not in PATH ({}): install OpenMPI (Debian: "
                  "openmpi-bin), on every host",
                  path ? path : "not set"));
}

// The output of other versions has other tags.
constexpr int kOpenMpiVersion = 4;
constexpr double kVersionSeconds = 30;
constexpr const char* kVersionRemedy =
    "put mpirun of OpenMPI 4 first in PATH (Debian: openmpi-bin), or start the ranks with mpirun itself "
    "(docs/getting-started.md)";

void check_version(const std::string& mpirun) {
  ProcessOptions options;
  options.file = mpirun;
  options.arguments = {"mpirun", "--version"};
  for (char** entry = environ; *entry; ++entry) options.environment.emplace_back(*entry);
  BoundedRun run(options, std::size_t{1} << 20);
  const bool ended = run.wait(kVersionSeconds, fmt::format("`{} --version`", mpirun)) == BoundedRun::End::completed;
  const std::string line = run.out().substr(0, run.out().find('\n'));
  const auto name = line.find("(Open ");  // then the version, after a parenthesis
  const auto at = name == line.npos ? name : line.find(") ", name);
  if (!ended || at == line.npos)
    fail_environment(fmt::format("zeroth launch --hosts needs mpirun of OpenMPI {}, but `{} --version` {}; {}",
                                 kOpenMpiVersion, mpirun,
                                 ended ? fmt::format("prints '{}'", printable(line)) : "does not end", kVersionRemedy));
  const std::string version = line.substr(at + 2);
  int major = 0;
  std::from_chars(version.data(), version.data() + version.size(), major);
  if (major != kOpenMpiVersion)
    fail_environment(fmt::format("zeroth launch --hosts needs mpirun of OpenMPI {}, but {} is OpenMPI {}; {}",
                                 kOpenMpiVersion, mpirun, printable(version), kVersionRemedy));
}

// mpirun would start what follows as a second program.
void check_arguments(const std::vector<std::string>& program) {
  for (const std::string& word : program)
    if (word == ":")
      fail_user(
          "zeroth launch --hosts: the program has the argument ':', at which mpirun begins another program; start a "
          "script that adds this argument");
}

// The variables of this process that the ranks get, and those that the launcher adds.
std::set<std::string> variables_of_ranks(const std::vector<std::string>& environment) {
  std::set<std::string> names;
  for (const std::string& entry : environment) {
    const std::string name = entry.substr(0, entry.find('='));
    // These are the launcher's own, if it is a rank itself.
    if (name == "ZR_RANK" || name == "ZR_WORLD" || name == "ZR_LOCAL_RANK" || name == "ZR_LOCAL_WORLD") continue;
    if (name == "ZR_HOST_ID") continue;  // of this machine
    if (name.starts_with("ZR_") || name.starts_with("OMP_") || name == "LD_LIBRARY_PATH") names.insert(name);
  }
  return names;
}

class HostLaunch : JobLoop {
 public:
  explicit HostLaunch(const HostLaunchOptions& options);
  ~HostLaunch() override;
  int run();

 private:
  void on_signal(int signal) override;
  void on_child() override;
  void on_tick() override { finish_if_done(); }
  void on_failure(const std::string& table) override;
  bool is_done() const override;

  std::vector<std::string> environment() const;
  std::vector<std::string> arguments() const;
  void start_mpirun(const std::string& file);
  void drain();
  void kill_mpirun_after(std::chrono::milliseconds timeout);
  void end_orphans() const { orphans_.kill_with("ZR_JOB=" + job_); }
  int result() const;

  const HostLaunchOptions& options_;
  std::array<std::unique_ptr<TaggedOutput>, 2> tagged_;
  std::array<Pipe, 2> outputs_;
  std::string store_name_;
  Process mpirun_;
  std::optional<control::ExitStatus> ended_;
  std::optional<std::chrono::steady_clock::time_point> report_deadline_;
  bool own_output_ = false;  // mpirun itself has printed something
};

HostLaunch::HostLaunch(const HostLaunchOptions& options) : JobLoop(ranks_of(options.hosts), true), options_(options) {
  for (const auto stream : {Output::out, Output::err})
    tagged_[stream] =
        std::make_unique<TaggedOutput>(packet_bytes(), [this, stream](int rank, bool error, std::string_view text) {
          if (rank >= 0 && rank < ranks_) return output_.bytes(rank, error ? Output::err : stream, text);
          own_output_ = true;
          writer_.write(STDERR_FILENO, std::string(text) + "\n");
        });
}

HostLaunch::~HostLaunch() {
  if (mpirun_.pid < 0 || ended_) return;
  kill(-mpirun_.pid, SIGKILL);
  while (!reap(mpirun_.pid)) usleep(1000);
  end_orphans();
}

std::vector<std::string> HostLaunch::environment() const {
  std::vector<std::pair<std::string, std::string>> added = options_.environment;
  added.insert(added.end(), {{"ZR_STORE", control::HostPort{store_name_, store_->port()}.text()},
                             {"ZR_JOB", job_},
                             {"ZR_USER_SIGNALS", "stop"},
                             {"ZR_TOKEN", token_}});
  if (!std::getenv("ZR_PROGRESS")) added.emplace_back("ZR_PROGRESS", "plain");
  if (options_.threads > 0) {
    added.emplace_back("ZR_THREADS", std::to_string(options_.threads));
    if (!std::getenv("OMP_NUM_THREADS")) added.emplace_back("OMP_NUM_THREADS", std::to_string(options_.threads));
  }
  std::set<std::string> names{"ZR_RANK", "ZR_WORLD", "ZR_LOCAL_RANK", "ZR_LOCAL_WORLD"};
  std::vector<std::string> all;
  for (const auto& [name, value] : added)
    if (names.insert(name).second) all.push_back(fmt::format("{}={}", name, value));
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry, name = text.substr(0, text.find('='));
    if (!control::tells_own_rank(std::getenv, name) && names.insert(name).second) all.push_back(text);
  }
  return all;
}

std::vector<std::string> HostLaunch::arguments() const {
  std::string hosts;
  for (const HostRanks& host : options_.hosts)
    hosts += fmt::format("{}{}:{}", hosts.empty() ? "" : ",", host.host, host.ranks);
  std::vector<std::string> words{"mpirun", "--bind-to", "none", "--tag-output",
                                 "-H",     hosts,       "-n",   std::to_string(ranks_)};
  for (const std::string& name : variables_of_ranks(environment())) words.insert(words.end(), {"-x", name});
  words.insert(words.end(), options_.program.begin(), options_.program.end());
  return words;
}

void HostLaunch::start_mpirun(const std::string& file) {
  ProcessOptions process;
  process.file = file;
  process.arguments = arguments();
  process.environment = environment();
  process.reads_stdin = !isatty(STDIN_FILENO);
  process.packets = true;
  mpirun_ = start_process(process);
  const std::array ends{mpirun_.out, mpirun_.err};
  for (const auto stream : {Output::out, Output::err})
    outputs_[stream].open(*this, ends[stream],
                          [this, stream](std::string_view bytes) { tagged_[stream]->packet(bytes); });
}

int HostLaunch::run() {
  check_arguments(options_.program);
  const std::string file = mpirun_file();
  check_version(file);
  const StoreAddress address = store_address(io_, options_.hosts);
  store_name_ = address.name;
  open_store(address.address, {address.port}, false);
  listen_to_signals();
  start_mpirun(file);
  run_loop();
  if (ended_->signal) end_orphans();  // mpirun has not ended its ranks
  if (finish_output() && stop_signal_ == SIGPIPE) return exit_code::environment;
  return result();
}

void HostLaunch::drain() {
  for (const auto stream : {Output::out, Output::err}) {
    outputs_[stream].drain();
    tagged_[stream]->end();
  }
  for (int rank = 0; rank < ranks_; ++rank) output_.ended(rank);
}

// Ranks that save a checkpoint get the request through the store, or SIGUSR1 for SIGTERM and SIGUSR2 for SIGINT, which
// mpirun passes on, and end by themselves; others are ended by mpirun. A second signal ends them at once.
void HostLaunch::on_signal(int signal) {
  const bool saves = !stop_signal_ && (signal == SIGTERM || signal == SIGINT) && all_set(control::saves_on_signal_key);
  if (!saves) store_->stop_failure_detection();
  const bool ends_already = stop_signal_ || reported_;
  if (!stop_signal_) stop_signal_ = signal;
  if (ends_already) return kill_mpirun_after({});
  if (saves && all_set(control::stops_on_request_key)) return store_->request_stop(signal);
  const int passed_on = signal == SIGINT ? SIGUSR2 : SIGUSR1;
  if (!ended_) kill(mpirun_.pid, saves ? passed_on : SIGTERM);
  if (!saves) kill_mpirun_after(kMpirunTimeout);
}

void HostLaunch::on_failure(const std::string& table) {
  report(table);
  kill_mpirun_after(store_->has_silent_ranks() ? std::chrono::seconds(0) : kAbortTimeout);
  finish_if_done();
}

// The daemons of mpirun on other hosts then kill their ranks; end_orphans() kills those here. mpirun itself waits for
// hosts that it cannot reach, and crashes if it gets SIGTERM while it ends the ranks.
void HostLaunch::kill_mpirun_after(std::chrono::milliseconds timeout) {
  deadline_.expires_after(timeout);
  deadline_.async_wait([this](const error_code& error) {
    if (!error && !ended_) kill(-mpirun_.pid, SIGKILL);
  });
}

void HostLaunch::on_child() {
  if (!ended_) ended_ = reap(mpirun_.pid);
  orphans_.reap_all_but(ended_ ? 0 : mpirun_.pid);
  if (!ended_ || report_deadline_) return;
  drain();
  report_deadline_ = std::chrono::steady_clock::now() + kReportTimeout;
  finish_if_done();
}

bool HostLaunch::is_done() const {
  return ended_ && (!store_->broken() || reported_ || std::chrono::steady_clock::now() >= *report_deadline_);
}

int HostLaunch::result() const {
  const int code = ended_->signal ? 128 + ended_->signal : ended_->code;
  if (ended_->signal && !stop_signal_ && !reported_)
    log(ZR_LOG_ERROR, fmt::format("mpirun was killed by signal {} ({}), so its ranks were ended", ended_->signal,
                                  strsignal(ended_->signal)));
  if (reported_ && (code == 0 || code >= 128)) return exit_code::peer_lost;
  if (stop_signal_ && code != 0) return 128 + stop_signal_;
  bool joined = false;
  for (int rank = 0; rank < ranks_; ++rank) joined |= store_->joined(rank);
  if (code != 0 && own_output_ && !joined) {
    log(ZR_LOG_ERROR, fmt::format("mpirun ended with exit code {} before a rank joined the job: see its message above. "
                                  "Every host must be reachable (ssh HOST true, without a password), and have OpenMPI "
                                  "and the program at the same paths",
                                  code));
    return exit_code::environment;
  }
  return code >= 128 ? exit_code::peer_lost : code;
}
}  // namespace

int launch_on_hosts(const HostLaunchOptions& options) {
  control::check_launched_once(std::getenv, ::getpid());
  return HostLaunch(options).run();
}

}  // namespace zr::host::cli
