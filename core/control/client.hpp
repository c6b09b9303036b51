// The rank side of the control plane: one thread and one connection to the store. Rank 0 may also run the store.
#pragma once

#include <array>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/steady_timer.hpp>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "control/connector.hpp"
#include "control/control.hpp"
#include "control/environment.hpp"
#include "control/job_secret.hpp"
#include "control/store.hpp"

namespace zr::host::control {

class ControlClient final : public Control {
 public:
  /// Joins the job; throws the same failures as Control::join().
  ControlClient(RankInfo rank_info, std::chrono::milliseconds timeout);
  ~ControlClient() override;
  /// Calls leave() if the caller has not, and ends the thread. Idempotent. Must not be called in a forked child.
  void close();

  int rank() const override { return rank_info_.rank; }
  int world() const override { return rank_info_.world; }
  int local_rank() const override { return rank_info_.local_rank; }
  int local_world() const override { return rank_info_.local_world; }
  const std::string& job_id() const override { return start_.job; }
  void put(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override;
  void drop(const std::string& key) override;
  void set_activity(const Activity& activity) override;
  bool broken() const override { return broken_.load(std::memory_order_relaxed); }
  std::string report(const std::string& mine) override;
  void on_broken(const void* owner, std::function<void()> callback) override;
  void leave(int64_t step, bool failed) override;

 private:
  using Clock = std::chrono::steady_clock;
  // Called on the control thread.
  void welcomed(std::shared_ptr<Connection> connection);
  void message(protocol::Type type, std::string_view body);
  void lost_store();
  void send_heartbeat();
  void schedule_heartbeat(std::chrono::milliseconds pause);
  void check_store_host();
  bool store_host_is_dead() const;
  void broke(const std::string& headline);
  void run_callbacks();
  void end_if_absent();
  void shut_down();
  void stop_if_done();
  // Called on any thread.
  static int64_t ms_since(Clock::time_point then);
  std::vector<boost::asio::ip::tcp::endpoint> find_store(Clock::time_point deadline);
  boost::asio::ip::address address_to_bind(const boost::asio::ip::address& remote);
  void warn_if_open(const std::string& address) const;
  void wait_joined(Clock::time_point deadline);
  void count_locals();
  void post_send(std::string message);
  void leave_locked(int64_t step, bool failed);
  protocol::Heartbeat heartbeat_locked();
  std::string own_failure_report_locked(const std::string& headline) const;
  std::string store_host_text_locked() const;

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
  std::recursive_mutex callback_mutex_;  // held while a callback runs
  std::map<const void*, std::function<void()>> callbacks_;

  mutable std::mutex mutex_;  // guards all members below
  std::condition_variable changed_;
  std::exception_ptr failure_;  // why joining failed
  bool connection_made_ = false, joined_ = false, reported_ = false, closed_ = false, store_gone_ = false,
       left_ = false;
  protocol::Start start_;
  Activity activity_;
  std::string getting_;  // the key that get() waits for
  Clock::time_point activity_since_, getting_since_, last_heard_;
  std::array<protocol::Call, protocol::kMaxCalls> calls_;  // ring buffer of the most recent collectives
  uint64_t calls_made_ = 0, calls_reported_ = 0;
  bool heartbeat_is_due_ = false;  // the step has changed since the last heartbeat
  uint64_t leaves_ = 0, left_sequence_ = 0;
  int64_t left_step_ = 0;
  bool left_failed_ = false;
  std::string headline_;
  std::optional<std::string> deferred_;  // headline of a failure that came after this rank had left
  std::optional<std::string> failure_report_;
  uint64_t last_id_ = 0;
  std::map<uint64_t, std::optional<std::string>> gets_;
};

}  // namespace zr::host::control
