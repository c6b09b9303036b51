// The thread of ControlClient: messages from and to the store, and the end of the process if the training thread does
// not react to a failure.
#include <fmt/format.h>

#include <boost/asio/post.hpp>
#include <utility>

#include "base/log.hpp"
#include "control/client.hpp"
#include "control/failure_report.hpp"

namespace zr::host::control {

using boost::system::error_code;
using protocol::Type;

namespace {
constexpr auto kHeartbeatInterval = std::chrono::milliseconds(200);
constexpr int kInterruptHeartbeats = 5;  // how long an interrupt waits for a wait: the program may react itself
constexpr auto kGrace = std::chrono::seconds(2);                  // time limit for the training thread to call report()
constexpr auto kGoodbyeTimeout = std::chrono::milliseconds(500);  // limit if the peer does not read
constexpr int64_t kSilenceMs = 1000;
}  // namespace

int64_t ControlClient::ms_since(Clock::time_point then) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - then).count();
}

void ControlClient::on_connected(std::shared_ptr<Connection> connection) {
  connection_ = std::move(connection);
  connection_->set_callbacks([this](Type type, std::string_view body) { on_message(type, body); },
                             [this] { on_store_lost(); }, protocol::kMaxBytes);
  {
    const MutexLock lock(mutex_);
    connection_made_ = true;
    last_message_at_ = Clock::now();
  }
  send_heartbeat();
}

void ControlClient::on_message(Type type, std::string_view body) {
  protocol::Reader reader(body);
  MutexLock lock(mutex_);
  last_message_at_ = Clock::now();
  switch (type) {
    case Type::start:
      start_ = protocol::decode_start(body);
      joined_ = true;
      activity_ = {};
      activity_since_ = last_message_at_;
      connection_->send(protocol::encode(Type::heartbeat, heartbeat_locked()));
      break;
    case Type::value: {
      const auto at = gets_.find(reader.u64());
      if (at != gets_.end()) at->second = reader.text();
      break;
    }
    case Type::failure_notice: {
      const std::string headline = reader.text();
      lock.unlock();
      return handle_job_failure(headline);
    }
    case Type::failure_report: failure_report_ = reader.text(); break;
    case Type::stop: stop_requested_.store(reader.u8(), std::memory_order_relaxed); return reader.end();
    case Type::goodbye: store_host_left_ = protocol::decode_heartbeat(body); break;
    case Type::pong: rank_silence_ms_ = reader.i64(); return reader.end();
    default: throw protocol::Malformed("not a message to a rank");
  }
  changed_.notify_all();
}

void ControlClient::on_store_lost() {
  connection_ = nullptr;
  MutexLock lock(mutex_);
  store_gone_ = true;
  changed_.notify_all();
  if (closed_) {
    lock.unlock();
    return stop_if_done();
  }
  if (store_host_left_) return;
  const std::string headline = broken() ? headline_ : store_host_text_locked() + " is lost: its connection closed";
  if (!failure_report_) failure_report_ = local_failure_report_locked(headline);
  lock.unlock();
  handle_job_failure(headline);
}

void ControlClient::send_heartbeat() {
  if (connection_) {
    const MutexLock lock(mutex_);
    if (host::take_interrupt()) interrupt_heartbeats_ = kInterruptHeartbeats;
    if (interrupt_heartbeats_ > 0) {
      --interrupt_heartbeats_;
      if (activity_.waiting && !broken()) {
        interrupt_heartbeats_ = 0;
        const std::string text =
            fmt::format("rank {} was interrupted while it waited in {}", rank_info_.rank, activity_.what);
        connection_->send(protocol::Writer().text(text).message(Type::report));
      }
    }
    heartbeat_is_due_ = false;
    connection_->send(protocol::encode(Type::heartbeat, heartbeat_locked()));
  }
  if (store_host_left_) check_store_host();
  if (connection_ && store_host_is_dead()) {
    std::exchange(connection_, nullptr)->close();
    on_store_lost();
  }
  schedule_heartbeat(kHeartbeatInterval);
}

void ControlClient::schedule_heartbeat(std::chrono::milliseconds pause) {
  heartbeat_timer_.expires_after(pause);
  heartbeat_timer_.async_wait([this](const error_code& error) {
    if (!error) send_heartbeat();
  });
}

// Checks the process, because a child that rank 0 forked may keep the connection open after rank 0 dies.
bool ControlClient::store_host_is_dead() const {
  const MutexLock lock(mutex_);
  const auto& peers = start_.peers;
  return !rank_info_.launched && !closed_ && !peers.empty() && ms_since(last_message_at_) > kSilenceMs &&
         peers[0].machine == self_.machine && protocol::is_dead(peers[0].pid);
}

// After rank 0, the store host, has left normally, only this rank can detect that rank 0 will never answer.
void ControlClient::check_store_host() {
  MutexLock lock(mutex_);
  if (left_ || closed_ || !activity_.waiting) return;
  const bool never_answered =
      store_host_left_->leaves > leaves_ ? activity_.sequence > store_host_left_->left_sequence : true;
  if (!never_answered) return;
  const std::string headline = fmt::format("rank 0 {} while rank {} waits in {}",
                                           left_while_awaited_text(*store_host_left_), rank_info_.rank, activity_.what);
  if (!failure_report_) failure_report_ = local_failure_report_locked(headline);
  lock.unlock();
  handle_job_failure(headline);
}

void ControlClient::handle_job_failure(const std::string& headline) {
  {
    const MutexLock lock(mutex_);
    if (broken() || closed_) return;
    if (rank_info_.launched && !exit_function())  // the program may catch the failure, as soon as it does not compute
      put(continues_after_failure_key(rank_info_.rank), "yes");
    if (left_) {
      late_failure_ = headline;
      return;
    }
    headline_ = headline;
    if (connection_)
      connection_->send(
          protocol::encode(Type::final_status, heartbeat_locked()));  // before a waiting thread sees broken_
    broken_.store(true, std::memory_order_relaxed);
    changed_.notify_all();
  }
  run_callbacks();
  grace_timer_.expires_after(kGrace);
  grace_timer_.async_wait([this](const error_code& error) {
    if (!error) end_if_unresponsive();
  });
}

void ControlClient::run_callbacks() {
  const RecursiveMutexLock lock(callback_mutex_);
  for (const auto& [owner, callback] : std::exchange(callbacks_, {})) callback();
}

// The training thread computes, or blocks where it cannot see the failure.
void ControlClient::end_if_unresponsive() {
  const ExitFunction end = exit_function();
  if (!end) return;
  MutexLock lock(mutex_);
  if (reported_ || left_ || closed_) return;
  std::string text = fmt::format("rank {} (pid {}) exits because the job has failed; last activity: {}; {}",
                                 rank_info_.rank, pid_, activity_text(activity_, ms_since(activity_since_)), headline_);
  if (rank_info_.hosts_store && failure_report_) text = *failure_report_;  // no other process prints the report
  lock.unlock();
  log_failure(text);
  end(exit_code::peer_lost);
}

protocol::Heartbeat ControlClient::heartbeat_locked() {
  protocol::Heartbeat heartbeat;
  heartbeat.activity = activity_;
  heartbeat.age_ms = ms_since(activity_since_);
  if (!awaited_key_.empty()) {
    heartbeat.activity.what = fmt::format("get of key '{}'", awaited_key_).substr(0, protocol::kMaxWhatBytes);
    heartbeat.activity.waiting = heartbeat.awaits_key = true;
    heartbeat.age_ms = ms_since(get_since_);
  }
  heartbeat.leaves = leaves_;
  heartbeat.left_sequence = left_sequence_;
  heartbeat.left_step = left_step_;
  heartbeat.left = left_;
  heartbeat.failed = left_failed_;
  heartbeat.exited = left_by_exit_;
  const uint64_t first = std::max(
      collectives_sent_, collectives_issued_ > collectives_.size() ? collectives_issued_ - collectives_.size() : 0);
  for (uint64_t i = first; i < collectives_issued_; ++i)
    heartbeat.recent.push_back(collectives_[i % collectives_.size()]);
  collectives_sent_ = collectives_issued_;
  return heartbeat;
}

std::string ControlClient::store_host_text_locked() const {
  if (rank_info_.launched) return "the launcher, which runs the job's store,";
  const auto& peers = start_.peers;
  return rank_text(0, peers.empty() ? 0 : peers[0].pid) + ", which runs the job's store,";
}

// The failure report from what this rank knows, without the store.
std::string ControlClient::local_failure_report_locked(const std::string& headline) const {
  std::vector<ReportLine> lines;
  for (std::size_t i = 0; i < start_.peers.size(); ++i) {
    const auto& peer = start_.peers[i];
    const bool is_this_rank = static_cast<int>(i) == rank_info_.rank;
    const char process = peer.machine == self_.machine ? protocol::state_of(peer.pid) : '?';
    std::string state = process == '?' ? "unknown" : process ? process_state_text(process) : "its process is gone";
    if (is_this_rank) state = activity_text(activity_, ms_since(activity_since_));
    if (!is_this_rank && i == 0 && store_host_left_) state = left_text(*store_host_left_);
    lines.push_back({static_cast<int>(i), peer.pid, peer.host, state});
  }
  return failure_report_text(headline, lines);
}

void ControlClient::shut_down() {
  heartbeat_timer_.cancel();
  if (connector_) connector_->stop();
  const bool is_cut_off = connection_ && connection_->is_unacknowledged();
  if (connection_) connection_->finish();
  protocol::Heartbeat farewell;
  auto timeout = kGoodbyeTimeout;
  {
    const MutexLock lock(mutex_);
    farewell = heartbeat_locked();
    if (store_is_silent_) timeout = {};
    ends_daemon_ = joined_ && store_is_silent_ && is_cut_off;
  }
  if (store_) {
    store_->finish(farewell, [this] {
      store_finished_ = true;
      stop_if_done();
    });
  }
  grace_timer_.expires_after(timeout);
  grace_timer_.async_wait([this](const error_code& error) {
    if (!error) io_.stop();
  });
  stop_if_done();
}

void ControlClient::stop_if_done() {
  if (!connection_ && store_finished_) io_.stop();
}

}  // namespace zr::host::control
