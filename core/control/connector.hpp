// Finds the job's store: tries the candidate addresses until the store at one of them welcomes this rank.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "control/connection.hpp"

namespace zr::host::control {

/// Runs on the thread of its io_context. Calls exactly one of the callbacks `welcomed` and `failed`, once.
class Connector : public std::enable_shared_from_this<Connector> {
 public:
  using Welcomed = std::function<void(std::shared_ptr<Connection>)>;
  using Failed = std::function<void(const Error&)>;
  using Time = std::chrono::steady_clock::time_point;

  /// The first message to send. If `port` is not 0, the message is sent only to this port, instead of the ports of the
  /// endpoints.
  struct Greeting {
    std::string message;
    uint16_t port = 0;
  };
  /// Called at each attempt. It returns nothing while there is no greeting yet; `no_hello` is then the reason in
  /// messages. `who` names this rank in messages: "rank 3".
  using Hello = std::function<std::optional<Greeting>()>;
  Connector(boost::asio::io_context& io, std::vector<boost::asio::ip::tcp::endpoint> endpoints, Hello hello,
            std::string no_hello, Time deadline, std::string who);
  void start(Welcomed welcomed, Failed failed);
  void stop();

 private:
  void attempt(std::size_t index);
  void greet(std::size_t index, boost::asio::ip::tcp::socket socket, const std::string& message);
  void next(std::size_t index, const std::string& why);
  void fail(const Error& failure);

  boost::asio::io_context& io_;
  const std::vector<boost::asio::ip::tcp::endpoint> endpoints_;
  const Hello hello_;
  const std::string no_hello_, who_;
  const Time deadline_;
  boost::asio::steady_timer timer_;
  Welcomed welcomed_;
  Failed failed_;
  boost::asio::ip::tcp::endpoint tried_;
  std::string why_;  // why the last attempt failed
  std::shared_ptr<Connection> connection_;
  std::shared_ptr<boost::asio::ip::tcp::socket> socket_;
  uint64_t attempt_ = 0;  // number of the current attempt; handlers of earlier attempts do nothing
  bool over_ = false;
};

/// Every address of `host` combined with each port. Retries until the deadline, then throws EnvironmentError.
std::vector<boost::asio::ip::tcp::endpoint> resolve(const std::string& host, const std::vector<uint16_t>& ports,
                                                    Connector::Time deadline);

}  // namespace zr::host::control
