// The rank side of the control plane: one thread and one connection to the store. Rank 0 may also run the store.
#pragma once

#include <array>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/steady_timer.hpp>
#include <map>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "control/connector.hpp"
#include "control/control.hpp"
#include "control/environment.hpp"
#include "control/job_secret.hpp"
#include "control/step_board.hpp"
#include "control/store.hpp"
#include "zr/mutex.hpp"

namespace zr::host::control {

class ControlClient final : public Control {
 public:
  /// Joins the job; throws the same failures as Control::join().
  ControlClient(RankInfo rank_info, std::chrono::milliseconds timeout);
  ~ControlClient() override;
  /// Calls leave() if the caller has not, and ends the thread. Idempotent. Must not be called in a forked child.
  void close() ZR_EXCLUDES(mutex_);

  int rank() const override { return rank_info_.rank; }
  int world() const override { return rank_info_.world; }
  int local_rank() const override { return rank_info_.local_rank; }
  int local_world() const override { return rank_info_.local_world; }
  std::vector<int> hosts() const override;
  const std::string& job_id() const override ZR_NO_THREAD_SAFETY_ANALYSIS {  // does not change after the constructor
    return start_.job;
  }
  void put(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override ZR_EXCLUDES(mutex_);
  void drop(const std::string& key) override;
  void set_activity(const Activity& activity) override ZR_EXCLUDES(mutex_);
  bool broken() const override { return broken_.load(std::memory_order_relaxed); }
  int stop_requested() const override { return stop_requested_.load(std::memory_order_relaxed); }
  std::string report(const std::string& observation) override ZR_EXCLUDES(mutex_);
  void on_broken(const void* owner, std::function<void()> callback) override ZR_EXCLUDES(callback_mutex_);
  void leave(int64_t step, bool failed) override ZR_EXCLUDES(mutex_);
  void set_silence_limit(std::chrono::milliseconds limit) override ZR_EXCLUDES(mutex_);

 private:
  using Clock = std::chrono::steady_clock;
  // Called on the control thread.
  void on_connected(std::shared_ptr<Connection> connection) ZR_EXCLUDES(mutex_);
  void on_message(protocol::Type type, std::string_view body) ZR_EXCLUDES(mutex_);
  void on_store_lost() ZR_EXCLUDES(mutex_);
  void send_heartbeat() ZR_EXCLUDES(mutex_);
  void schedule_heartbeat(std::chrono::milliseconds pause);
  void check_store_host() ZR_EXCLUDES(mutex_);
  bool store_host_is_dead() const ZR_EXCLUDES(mutex_);
  void handle_job_failure(const std::string& headline) ZR_EXCLUDES(mutex_, callback_mutex_);
  void run_callbacks() ZR_EXCLUDES(callback_mutex_);
  void end_if_unresponsive() ZR_EXCLUDES(mutex_);
  void shut_down();
  void stop_if_done();
  // Called on any thread.
  static int64_t ms_since(Clock::time_point then);
  std::vector<boost::asio::ip::tcp::endpoint> find_store(Clock::time_point deadline);
  boost::asio::ip::address address_to_bind(const boost::asio::ip::address& remote);
  void warn_if_open(const std::string& address) const;
  void wait_joined(Clock::time_point deadline) ZR_EXCLUDES(mutex_);
  void count_local_ranks_locked() ZR_REQUIRES(mutex_);
  void post_send(std::string message);
  std::string silent_peer_locked() const ZR_REQUIRES(mutex_);
  void leave_locked(int64_t step, bool failed) ZR_REQUIRES(mutex_);
  protocol::Heartbeat heartbeat_locked() ZR_REQUIRES(mutex_);
  std::string local_failure_report_locked(const std::string& headline) const ZR_REQUIRES(mutex_);
  std::string store_host_text_locked() const ZR_REQUIRES(mutex_);

  RankInfo rank_info_;
  const int64_t pid_;
  const protocol::Peer self_;
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  boost::asio::steady_timer heartbeat_timer_, grace_timer_;
  std::thread thread_;

  // Used by the control thread only, once it runs.
  std::unique_ptr<Store> store_;
  std::unique_ptr<JobSecret> secret_;
  std::shared_ptr<Connector> connector_;
  std::shared_ptr<Connection> connection_;
  std::optional<protocol::Heartbeat> store_host_left_;
  bool store_finished_ = true;

  std::atomic<bool> broken_{false};
  std::atomic<int> stop_requested_{0};
  RecursiveMutex callback_mutex_;  // held while a callback runs
  std::map<const void*, std::function<void()>> callbacks_ ZR_GUARDED_BY(callback_mutex_);

  std::unique_ptr<StepBoard> steps_;  // of the launcher on this machine; null: heartbeats tell the step
  mutable Mutex mutex_;
  ConditionVariable changed_;
  std::exception_ptr failure_ ZR_GUARDED_BY(mutex_);  // why joining failed
  bool connection_made_ ZR_GUARDED_BY(mutex_) = false;
  bool joined_ ZR_GUARDED_BY(mutex_) = false;
  bool reported_ ZR_GUARDED_BY(mutex_) = false;
  bool closed_ ZR_GUARDED_BY(mutex_) = false;
  bool store_gone_ ZR_GUARDED_BY(mutex_) = false;
  bool store_is_silent_ ZR_GUARDED_BY(mutex_) = false;  // it has not answered a report()
  bool ends_daemon_ ZR_GUARDED_BY(mutex_) = false;      // the link to the store is cut
  bool left_ ZR_GUARDED_BY(mutex_) = false;
  protocol::Start start_ ZR_GUARDED_BY(mutex_);  // constant once joined_ is set
  Activity activity_ ZR_GUARDED_BY(mutex_);
  std::string awaited_key_ ZR_GUARDED_BY(mutex_);  // the key that get() waits for
  Clock::time_point activity_since_ ZR_GUARDED_BY(mutex_);
  Clock::time_point get_since_ ZR_GUARDED_BY(mutex_);
  Clock::time_point last_message_at_ ZR_GUARDED_BY(mutex_);  // from the store
  int64_t rank_silence_ms_ ZR_GUARDED_BY(mutex_) = 0;        // of the most silent rank, as the store said then
  std::chrono::milliseconds silence_limit_ ZR_GUARDED_BY(mutex_) = std::chrono::milliseconds::max();
  // Ring buffer of the most recent collectives, and how many have been issued and sent to the store.
  std::array<protocol::IssuedCollective, protocol::kMaxCollectives> collectives_ ZR_GUARDED_BY(mutex_);
  uint64_t collectives_issued_ ZR_GUARDED_BY(mutex_) = 0;
  uint64_t collectives_sent_ ZR_GUARDED_BY(mutex_) = 0;
  bool heartbeat_is_due_ ZR_GUARDED_BY(mutex_) = false;  // the step has changed since the last heartbeat
  int interrupt_heartbeats_ ZR_GUARDED_BY(mutex_) = 0;   // for which an interrupt still ends a wait
  uint64_t leaves_ ZR_GUARDED_BY(mutex_) = 0;
  // Of the last collective that this rank has issued since it left; its activity may be the wait for an earlier one.
  uint64_t last_sequence_ ZR_GUARDED_BY(mutex_) = 0;
  uint64_t left_sequence_ ZR_GUARDED_BY(mutex_) = 0;
  int64_t left_step_ ZR_GUARDED_BY(mutex_) = 0;
  bool left_failed_ ZR_GUARDED_BY(mutex_) = false;
  bool left_by_exit_ ZR_GUARDED_BY(mutex_) = false;
  std::string headline_ ZR_GUARDED_BY(mutex_);
  std::optional<std::string> late_failure_ ZR_GUARDED_BY(mutex_);  // headline of a failure after this rank had left
  std::optional<std::string> failure_report_ ZR_GUARDED_BY(mutex_);
  uint64_t last_get_id_ ZR_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::optional<std::string>> gets_ ZR_GUARDED_BY(mutex_);  // values of pending gets, by id
};

}  // namespace zr::host::control
