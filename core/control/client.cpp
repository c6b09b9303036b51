#include "control/client.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/ip/address_v4.hpp>
#include <boost/asio/ip/address_v6.hpp>
#include <boost/asio/post.hpp>
#include <fstream>
#include <random>
#include <utility>

#include "base/log.hpp"
#include "base/process_exit.hpp"
#include "base/text.hpp"
#include "base/thread_without_signals.hpp"
#include "control/failure_report.hpp"

namespace zr::host::control {

namespace ip = boost::asio::ip;
using boost::system::error_code;
using ip::tcp;
using protocol::Type;

namespace {
constexpr auto kFailureReportTimeout = std::chrono::milliseconds(2000);  // the store builds it within 1 s
constexpr auto kSilentStoreTimeout = std::chrono::milliseconds(500);     // the same, if the store is silent
constexpr auto kHeartbeatAfterStep = std::chrono::milliseconds(10);      // delay until the store learns of a new step

constexpr auto kLeastSilence = std::chrono::milliseconds(2000);
constexpr auto kSilencePoll = std::chrono::milliseconds(200);
constexpr int kSilentPolls = 3;  // in sequence: all processes of a job may be stopped, and continue one after another

// Ends the daemon of mpirun that has started this process. It cannot reach mpirun either, and would stay until TCP
// gives up, for 15 minutes or more.
void end_daemon() {
  const pid_t parent = getppid();
  std::string name;
  std::getline(std::ifstream(fmt::format("/proc/{}/comm", parent)), name);
  if (name == "orted") kill(parent, SIGTERM);
}

// The same form as the launcher's id: short, because other names contain it.
std::string new_job_id() {
  std::random_device random;
  return fmt::format("zr-{:08x}{:04x}", random(), random() & 0xffff);
}
}  // namespace

ControlClient::ControlClient(RankInfo rank_info, std::chrono::milliseconds timeout)
    : rank_info_(std::move(rank_info)),
      pid_(getpid()),
      self_(protocol::this_peer()),
      work_(boost::asio::make_work_guard(io_)),
      heartbeat_timer_(io_),
      grace_timer_(io_) {
  const auto deadline = Clock::now() + timeout;
  activity_.what = "join";
  activity_.waiting = true;
  activity_since_ = last_message_at_ = Clock::now();
  if (rank_info_.launched) steps_ = StepBoard::open(std::getenv(kStepBoardVariable), rank_info_.job, rank_info_.world);
  if (rank_info_.shares_secret) secret_ = std::make_unique<JobSecret>(rank_info_.job);
  auto endpoints = find_store(deadline);
  const auto first_message = [this]() -> std::optional<Connector::FirstMessage> {
    const bool reads_secret = rank_info_.shares_secret && !rank_info_.hosts_store;
    const auto shared = reads_secret ? secret_->read() : std::optional(JobSecret::Shared{rank_info_.token, 0});
    if (!shared) return {};
    return Connector::FirstMessage{protocol::encode(protocol::JoinRequest{rank_info_.job, shared->token,
                                                                          rank_info_.rank, rank_info_.world, self_}),
                                   shared->port};
  };
  connector_ =
      std::make_shared<Connector>(io_, std::move(endpoints), first_message,
                                  secret_ ? "rank 0 has not written the job's secret to " + secret_->path() : "",
                                  deadline, fmt::format("rank {}", rank_info_.rank));
  connector_->start([this](std::shared_ptr<Connection> connection) { on_connected(std::move(connection)); },
                    [this](const Error& failure) {
                      const MutexLock lock(mutex_);
                      failure_ = error_with(failure.exit_code(), failure.what());
                      changed_.notify_all();
                    });
  thread_ = thread_without_signals([this] { io_.run(); });
  try {
    wait_joined(deadline);
  } catch (...) {
    close();
    throw;
  }
}

ControlClient::~ControlClient() { close(); }

// The addresses to connect to. If this rank runs the store, starts the store first.
std::vector<tcp::endpoint> ControlClient::find_store(Clock::time_point deadline) {
  if (rank_info_.shares_secret && !rank_info_.hosts_store) rank_info_.ports.resize(1);  // JobSecret gives the port
  auto endpoints = resolve(rank_info_.address, rank_info_.ports, deadline);
  if (!rank_info_.hosts_store) return endpoints;
  const auto address = address_to_bind(endpoints.front().address());
  if (rank_info_.shares_secret) rank_info_.token = new_secret();
  Store::Options options;
  options.world = rank_info_.world;
  options.job = rank_info_.job;
  options.token = rank_info_.token;
  options.job_id = new_job_id();
  store_ = std::make_unique<Store>(io_, std::move(options), address, rank_info_.ports);
  store_finished_ = false;
  if (rank_info_.shares_secret) secret_->create({rank_info_.token, store_->port()});
  if (!address.is_unspecified() && !address.is_loopback()) warn_if_open(address.to_string());
  if (!address.is_unspecified()) return {tcp::endpoint(address, store_->port())};
  warn_if_open("every address of this node");
  const boost::asio::ip::address loopback =
      address.is_v4() ? ip::address(ip::address_v4::loopback()) : ip::address(ip::address_v6::loopback());
  return {tcp::endpoint(loopback, store_->port())};
}

// The address that the other ranks connect to, so that the store is not reachable from other networks. All addresses if
// that address does not belong to this node (a forwarded port), or if its name resolves to loopback here although ranks
// on other nodes connect.
ip::address ControlClient::address_to_bind(const ip::address& remote) {
  const bool one_host = rank_info_.local_world == rank_info_.world || rank_info_.address == "localhost" ||
                        rank_info_.address == remote.to_string();
  error_code error;
  if (!remote.is_loopback()) {
    tcp::acceptor trial(io_);
    const tcp::endpoint any_port(remote, 0);
    trial.open(any_port.protocol(), error);
    if (!error) trial.bind(any_port, error);
  }
  if (remote.is_loopback() ? one_host : !error) return remote;
  return remote.is_v4() ? ip::address(ip::address_v4::any()) : ip::address(ip::address_v6::any());
}

void ControlClient::warn_if_open(const std::string& address) const {
  if (!rank_info_.guessable) return;
  log(ZR_LOG_WARN,
      fmt::format("the job's store listens on {}, port {}, and {} gave the ranks no secret: any process that reaches "
                  "this port can join the job or end it. Set ZR_TOKEN to the same secret on every rank (SECURITY.md)",
                  address, store_->port(), rank_info_.launcher));
}

void ControlClient::wait_joined(Clock::time_point deadline) {
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  MutexLock lock(mutex_);
  const auto joined_or_failed = [&]() ZR_REQUIRES(mutex_) { return joined_ || failure_ || broken(); };
  changed_.wait_until(lock, deadline, joined_or_failed);
  if (!joined_or_failed() && !connection_made_)
    changed_.wait_for(lock, kFailureReportTimeout, joined_or_failed);  // the connector reports why
  if (failure_) std::rethrow_exception(failure_);
  const bool all_joined = joined_;
  if (all_joined && !broken()) return count_local_ranks_locked();
  lock.unlock();
  if (broken()) throw PeerLostError(report(""));
  throw PeerLostError(
      report("not all ranks have joined within " + duration_text(static_cast<double>(limit.count()) / 1000)));
}

void ControlClient::count_local_ranks_locked() {
  int lower = 0, local = 0;  // ranks on this machine: those below this rank, and all
  for (std::size_t rank = 0; rank < start_.peers.size(); ++rank) {
    if (start_.peers[rank].machine != self_.machine) continue;
    ++local;
    if (static_cast<int>(rank) < rank_info_.rank) ++lower;
  }
  if (rank_info_.local_rank < 0) rank_info_.local_rank = lower;
  if (rank_info_.local_world < 0) rank_info_.local_world = local;
}

std::vector<int> ControlClient::hosts() const {
  std::vector<int> hosts;
  std::map<std::string, int> numbers;
  const MutexLock lock(mutex_);
  for (const protocol::Peer& peer : start_.peers)
    hosts.push_back(numbers.try_emplace(peer.node, static_cast<int>(numbers.size())).first->second);
  return hosts;
}

void ControlClient::post_send(std::string message) {
  boost::asio::post(io_, [this, message = std::move(message)]() mutable {
    if (connection_) connection_->send(std::move(message));
  });
}

void ControlClient::put(const std::string& key, const std::string& value) {
  for (const std::string& problem : {protocol::key_problem(key), protocol::value_problem(key, value.size())})
    if (!problem.empty()) fail_internal(problem);
  post_send(protocol::Writer().text(key).text(value).message(Type::put));
}

void ControlClient::drop(const std::string& key) { post_send(protocol::Writer().text(key).message(Type::drop)); }

std::string ControlClient::get(const std::string& key, std::chrono::milliseconds timeout) {
  MutexLock lock(mutex_);
  const uint64_t id = ++last_get_id_;
  auto& result = gets_[id];
  awaited_key_ = key;
  get_since_ = Clock::now();
  post_send(protocol::Writer().u64(id).text(key).message(Type::get));
  const auto deadline = get_since_ + timeout;
  const auto is_over = [&]() ZR_REQUIRES(mutex_) { return result || broken() || store_gone_; };
  std::string silent;
  for (int polls = 0; polls < kSilentPolls && Clock::now() < deadline;) {
    if (changed_.wait_until(lock, std::min(deadline, Clock::now() + kSilencePoll), is_over)) break;
    silent = silent_peer_locked();
    polls = silent.empty() ? 0 : polls + 1;
  }
  const auto value = std::move(result);
  const bool gone = store_gone_;
  gets_.erase(id);
  const std::string waited = std::exchange(awaited_key_, "");
  if (value) return *value;
  lock.unlock();
  if (broken()) throw PeerLostError(report(""));
  if (gone)
    throw PeerLostError(fmt::format("cannot get key '{}': rank 0, which ran the job's store, has ended", waited));
  if (!silent.empty())
    throw PeerLostError(
        report(fmt::format("stopped waiting for key '{}', because {} does not answer", waited, silent)));
  throw PeerLostError(fmt::format("no rank has put '{}' into the job's store within {}", waited,
                                  duration_text(static_cast<double>(timeout.count()) / 1000)));
}

void ControlClient::set_silence_limit(std::chrono::milliseconds limit) {
  const MutexLock lock(mutex_);
  silence_limit_ = std::max(limit, kLeastSilence);
}

// What has been silent for too long; "" if nothing has.
std::string ControlClient::silent_peer_locked() const {
  if (ms_since(last_message_at_) > silence_limit_.count()) return "the job's store";
  return rank_silence_ms_ > silence_limit_.count() ? "a rank" : "";
}

void ControlClient::set_activity(const Activity& activity) {
  const MutexLock lock(mutex_);
  if (left_) {
    left_ = false;
    if (late_failure_) boost::asio::post(io_, [this, headline = *late_failure_] { handle_job_failure(headline); });
  }
  activity_.sequence = activity.sequence;
  last_sequence_ = std::max(last_sequence_, activity.sequence);
  activity_.fingerprint = activity.fingerprint;
  activity_.waiting = activity.waiting;
  if (steps_) steps_->set(rank_info_.rank, activity.step);
  if (std::exchange(activity_.step, activity.step) != activity.step && !std::exchange(heartbeat_is_due_, true))
    boost::asio::post(io_, [this] { schedule_heartbeat(kHeartbeatAfterStep); });
  activity_.what.assign(activity.what, 0, protocol::kMaxWhatBytes);
  activity_since_ = Clock::now();
  if (activity.fingerprint == 0 || activity.sequence == 0) return;
  if (collectives_issued_ > 0 &&
      collectives_[(collectives_issued_ - 1) % collectives_.size()].sequence == activity.sequence)
    return;
  protocol::IssuedCollective& call = collectives_[collectives_issued_++ % collectives_.size()];
  call.sequence = activity.sequence;
  call.fingerprint = activity.fingerprint;
  call.what.assign(activity_.what);
}

std::string ControlClient::report(const std::string& observation) {
  MutexLock lock(mutex_);
  reported_ = true;
  if (!broken() && !store_gone_)
    post_send(protocol::Writer().text(observation.substr(0, protocol::kMaxReportBytes)).message(Type::report));
  const bool is_silent = Clock::now() - last_message_at_ > kFailureReportTimeout;
  changed_.wait_for(lock, is_silent ? kSilentStoreTimeout : kFailureReportTimeout,
                    [&]() ZR_REQUIRES(mutex_) { return failure_report_ || store_gone_; });
  if (!failure_report_) {
    std::string headline = headline_.empty() ? fmt::format("rank {}: {}", rank_info_.rank, observation) : headline_;
    if (!store_gone_) {
      store_is_silent_ = Clock::now() - last_message_at_ > kFailureReportTimeout;
      headline += fmt::format("; {} has not answered for {}", store_host_text_locked(),
                              duration_text(static_cast<double>(ms_since(last_message_at_)) / 1000));
      const bool near = !rank_info_.launched && !start_.peers.empty() && start_.peers[0].machine == self_.machine;
      const std::string state = near ? process_state_text(protocol::state_of(start_.peers[0].pid)) : "";
      if (!state.empty()) headline += ", and its process is " + state;
    }
    failure_report_ = local_failure_report_locked(headline);
  }
  std::string text = *failure_report_;
  if (!broken())
    boost::asio::post(io_, [this, headline = text.substr(0, text.find('\n'))] { handle_job_failure(headline); });
  return text;
}

void ControlClient::on_broken(const void* owner, std::function<void()> callback) {
  {
    const RecursiveMutexLock lock(callback_mutex_);
    callbacks_.erase(owner);
    if (callback) callbacks_.emplace(owner, std::move(callback));
  }
  if (broken()) boost::asio::post(io_, [this] { run_callbacks(); });
}

void ControlClient::leave_locked(int64_t step, bool failed) {
  if (left_ || broken()) return;
  post_send(protocol::encode(Type::heartbeat, heartbeat_locked()));  // reports the collectives issued before the leave
  left_ = true;
  ++leaves_;
  left_sequence_ = std::exchange(last_sequence_, 0);
  left_step_ = step;
  left_failed_ = failed || has_failed();
  collectives_issued_ = collectives_sent_ = 0;
  activity_.what.clear();
  activity_.waiting = false;
  post_send(protocol::encode(Type::heartbeat, heartbeat_locked()));
}

void ControlClient::leave(int64_t step, bool failed) {
  const MutexLock lock(mutex_);
  left_by_exit_ = process_exits();
  leave_locked(step, failed);
}

void ControlClient::close() {
  {
    MutexLock lock(mutex_);
    if (closed_) return;
    // The other ranks wait for the failure report, which the store on this rank writes.
    if (rank_info_.hosts_store && broken())
      changed_.wait_for(lock, kFailureReportTimeout, [&]() ZR_REQUIRES(mutex_) { return failure_report_.has_value(); });
    left_by_exit_ |= !left_;
    if (joined_) leave_locked(activity_.step, false);
    closed_ = true;
  }
  boost::asio::post(io_, [this] { shut_down(); });
  if (thread_.joinable()) thread_.join();
  if (secret_) secret_->remove();
  const MutexLock lock(mutex_);
  if (ends_daemon_) end_daemon();
}

}  // namespace zr::host::control
