// ControlClient's thread: what comes from the store and goes there, and the job's end where the program does not see
// it.
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <utility>

#include "base/log.hpp"
#include "control/client.hpp"
#include "control/failure_report.hpp"

namespace zr::host {

using boost::system::error_code;
using wire::Type;

namespace {
constexpr auto kBeat = std::chrono::milliseconds(200);
constexpr auto kGrace = std::chrono::seconds(2);               // for the training thread to come to report()
constexpr auto kForFarewell = std::chrono::milliseconds(500);  // at most, where the other end does not read
constexpr int64_t kSilenceMs = 1000;
}  // namespace

int64_t ControlClient::ms_since(Clock::time_point then) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - then).count();
}

void ControlClient::welcomed(std::shared_ptr<Connection> connection) {
  connection_ = std::move(connection);
  connection_->hand_over([this](Type type, std::string_view body) { message(type, body); }, [this] { lost_store(); },
                         wire::kMostBytes);
  {
    const std::lock_guard lock(mutex_);
    connection_made_ = true;
    heard_ = Clock::now();
  }
  beat();
}

void ControlClient::message(Type type, std::string_view body) {
  wire::Reader reader(body);
  std::unique_lock lock(mutex_);
  heard_ = Clock::now();
  switch (type) {
    case Type::start:
      start_ = wire::decode_start(body);
      joined_ = true;
      activity_ = {};
      activity_since_ = heard_;
      connection_->send(wire::encode(Type::beat, beat_locked()));
      break;
    case Type::value: {
      const auto at = gets_.find(reader.u64());
      if (at != gets_.end()) at->second = reader.text();
      break;
    }
    case Type::news: {
      const std::string headline = reader.text();
      lock.unlock();
      return broke(headline);
    }
    case Type::table: table_ = reader.text(); break;
    case Type::bye: keeper_left_ = wire::decode_beat(body); break;
    case Type::pong: return;
    default: throw wire::Malformed("not a message to a rank");
  }
  changed_.notify_all();
}

void ControlClient::lost_store() {
  connection_ = nullptr;
  std::unique_lock lock(mutex_);
  store_gone_ = true;
  changed_.notify_all();
  if (closed_) {
    lock.unlock();
    return stop_if_done();
  }
  if (keeper_left_) return;
  const std::string headline = broken() ? headline_ : keeper_locked() + " is lost: its connection closed";
  if (!table_) table_ = own_table_locked(headline);
  lock.unlock();
  broke(headline);
}

void ControlClient::beat() {
  if (connection_) {
    const std::lock_guard lock(mutex_);
    beat_is_due_ = false;
    connection_->send(wire::encode(Type::beat, beat_locked()));
  }
  if (keeper_left_) check_keeper();
  if (connection_ && keeper_is_dead()) {
    std::exchange(connection_, nullptr)->close();
    lost_store();
  }
  beat_after(kBeat);
}

void ControlClient::beat_after(std::chrono::milliseconds pause) {
  beat_timer_.expires_after(pause);
  beat_timer_.async_wait([this](const error_code& error) {
    if (!error) beat();
  });
}

// A child that rank 0 forked may keep the connection open.
bool ControlClient::keeper_is_dead() const {
  const std::lock_guard lock(mutex_);
  const auto& peers = start_.peers;
  return !place_.launched && !closed_ && !peers.empty() && ms_since(heard_) > kSilenceMs &&
         peers[0].machine == self_.machine && wire::is_dead(peers[0].pid);
}

// Rank 0 kept the store and has left in order: nobody else can tell that this rank waits for it in vain.
void ControlClient::check_keeper() {
  std::unique_lock lock(mutex_);
  if (left_ || closed_ || !activity_.waiting) return;
  const bool in_vain = keeper_left_->leaves > leaves_ ? activity_.sequence > keeper_left_->left_sequence : true;
  if (!in_vain) return;
  const std::string headline = "rank 0 " + in_vain_text(*keeper_left_) + " while rank " + std::to_string(place_.rank) +
                               " waits in " + activity_.what;
  if (!table_) table_ = own_table_locked(headline);
  lock.unlock();
  broke(headline);
}

void ControlClient::broke(const std::string& headline) {
  {
    const std::lock_guard lock(mutex_);
    if (broken() || closed_) return;
    if (left_) {
      deferred_ = headline;
      return;
    }
    headline_ = headline;
    if (connection_)
      connection_->send(wire::encode(Type::words, beat_locked()));  // before a waiting thread sees the news
    broken_.store(true, std::memory_order_relaxed);
    changed_.notify_all();
  }
  run_callbacks();
  grace_timer_.expires_after(kGrace);
  grace_timer_.async_wait([this](const error_code& error) {
    if (!error) end_if_absent();
  });
}

void ControlClient::run_callbacks() {
  const std::lock_guard lock(callback_mutex_);
  for (const auto& [owner, callback] : std::exchange(callbacks_, {})) callback();
}

// The training thread computes, or blocks where no news reaches it: the process must not outlive its job.
void ControlClient::end_if_absent() {
  std::unique_lock lock(mutex_);
  if (reported_ || left_ || closed_) return;
  std::string text = "rank " + std::to_string(place_.rank) + " (pid " + std::to_string(pid_) +
                     ") ends, the job is broken: it was " + doing_text(activity_, ms_since(activity_since_)) + "; " +
                     headline_;
  if (place_.serves && table_) text = *table_;  // nobody else prints it
  lock.unlock();
  log(ZR_LOG_ERROR, text);
  _exit(static_cast<int>(Exit::peer_lost));
}

wire::Beat ControlClient::beat_locked() {
  wire::Beat beat;
  beat.activity = activity_;
  beat.age_ms = ms_since(activity_since_);
  if (!getting_.empty()) {
    beat.activity.what = ("get of key '" + getting_ + "'").substr(0, wire::kMostWhatBytes);
    beat.activity.waiting = true;
    beat.age_ms = ms_since(getting_since_);
  }
  beat.leaves = leaves_;
  beat.left_sequence = left_sequence_;
  beat.left_step = left_step_;
  beat.left = left_;
  beat.failed = left_failed_;
  const uint64_t first = std::max(calls_told_, calls_made_ > calls_.size() ? calls_made_ - calls_.size() : 0);
  for (uint64_t i = first; i < calls_made_; ++i) beat.recent.push_back(calls_[i % calls_.size()]);
  calls_told_ = calls_made_;
  return beat;
}

std::string ControlClient::keeper_locked() const {
  if (place_.launched) return "the launcher, which keeps the job's store,";
  const auto& peers = start_.peers;
  return rank_text(0, peers.empty() ? 0 : peers[0].pid) + ", which keeps the job's store,";
}

// What this rank alone can say.
std::string ControlClient::own_table_locked(const std::string& headline) const {
  std::vector<TableLine> lines;
  for (std::size_t i = 0; i < start_.peers.size(); ++i) {
    const auto& peer = start_.peers[i];
    const bool mine = static_cast<int>(i) == place_.rank;
    const char process = peer.machine == self_.machine ? wire::state_of(peer.pid) : '?';
    std::string state = process == '?' ? "not known" : process ? state_text(process) : "its process is gone";
    if (mine) state = doing_text(activity_, ms_since(activity_since_));
    if (!mine && i == 0 && keeper_left_) state = left_text(*keeper_left_);
    lines.push_back({static_cast<int>(i), peer.pid, peer.host, state});
  }
  return table_text(headline, lines);
}

void ControlClient::shut_down() {
  beat_timer_.cancel();
  if (dial_) dial_->stop();
  if (connection_) connection_->finish();
  if (store_) {
    wire::Beat farewell;
    {
      const std::lock_guard lock(mutex_);
      farewell = beat_locked();
    }
    store_->finish(farewell, [this] {
      store_finished_ = true;
      stop_if_done();
    });
  }
  grace_timer_.expires_after(kForFarewell);
  grace_timer_.async_wait([this](const error_code& error) {
    if (!error) io_.stop();
  });
  stop_if_done();
}

void ControlClient::stop_if_done() {
  if (!connection_ && store_finished_) io_.stop();
}

}  // namespace zr::host
