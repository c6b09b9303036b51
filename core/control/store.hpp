// The job's store: rendezvous, membership, the news of a break and the table. Lives in the launcher, else in rank 0.
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

namespace zr::host {

/// Serves a job's ranks on an io_context, whose thread alone may call it. Keeps that io_context busy until close().
class Store {
 public:
  struct Options {
    int world = 1;
    std::string job, token;                                           // what a rank must show
    std::string job_id;                                               // what ranks are told to call the job
    bool launched = false;                                            // ended() will be told of every rank
    std::function<void(const std::string& table)> on_failure_report;  // once, if the job breaks
  };
  /// Listens on the first of `ports` that is free (0: any). Throws Failure(environment) if none is.
  Store(boost::asio::io_context& io, Options options, const boost::asio::ip::address& address,
        const std::vector<uint16_t>& ports);
  ~Store();
  Store(const Store&) = delete;

  uint16_t port() const;
  /// The launcher's own knowledge of rank processes.
  void started(int rank, int64_t pid);
  void ended(int rank, int64_t pid, const ExitStatus& exit_status);
  bool joined(int rank) const;
  bool broken() const;
  /// The user stops the job: ranks that end are no loss from now on.
  void stop_failure_detection();
  /// It does not stop after all.
  void resume_failure_detection();
  /// The rank that keeps this store has left in order: tells the others, then closes. `then` runs when they have read
  /// it.
  void finish(const protocol::Heartbeat& store_host, std::function<void()> then);
  void close();
  /// What a rank has put under the key; empty: nothing.
  std::string value(const std::string& key) const;
  /// Memory of all that the ranks have put and not dropped.
  std::size_t bytes() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace zr::host
