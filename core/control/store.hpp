// The job's store: rendezvous, membership, failure notices and the failure report. It runs in zeroth's launcher, or in
// rank 0 under other launchers.
#pragma once

#include <boost/asio/ip/address.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "control/failure_report.hpp"
#include "control/protocol.hpp"

namespace boost::asio {
class io_context;
}

namespace zr::host::control {

/// Serves the ranks of a job on an io_context. Call it only on the thread of that io_context. The io_context has work
/// until close().
class Store {
 public:
  struct Options {
    int world = 1;
    std::string job, token;                                           // what a rank must present
    std::string job_id;                                               // the job id that ranks receive
    bool launched = false;                                            // ended() will be called for every rank
    std::function<void(const std::string& table)> on_failure_report;  // called once, if the job fails
  };
  /// Listens on the first of `ports` that is free (0: any). Throws EnvironmentError if none of the ports is free.
  Store(boost::asio::io_context& io, Options options, const boost::asio::ip::address& address,
        const std::vector<uint16_t>& ports);
  ~Store();
  Store(const Store&) = delete;

  uint16_t port() const;
  /// The launcher reports that a rank process has started or ended.
  void started(int rank, int64_t pid);
  void ended(int rank, int64_t pid, const ExitStatus& exit_status);
  bool joined(int rank) const;
  bool broken() const;
  /// True if a rank has neither answered the failure notice nor sent anything for 2 s: it is stopped, or its host
  /// cannot be reached.
  bool has_silent_ranks() const;
  /// Makes Control::stop_requested() of all ranks return `signal`.
  void request_stop(int signal);
  /// The process that has joined as `rank`, if it is connected and on this machine; else 0. A process that the launcher
  /// has started may have started it.
  int64_t process_of(int rank) const;
  /// Call when the user stops the job: from now on, a rank that ends is not a failure.
  void stop_failure_detection();
  /// Detects failures again, for example because the job did not stop.
  void resume_failure_detection();
  /// Call when the rank that runs this store has left normally: notifies the other ranks, then closes. `then` runs when
  /// they have read the message.
  void finish(const protocol::Heartbeat& store_host, std::function<void()> then);
  void close();
  /// The value of the key; "" if no rank has put it.
  std::string value(const std::string& key) const;
  /// Memory of all keys and values that ranks have put and not dropped.
  std::size_t bytes() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace zr::host::control
