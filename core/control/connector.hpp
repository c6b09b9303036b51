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

/// Runs on the thread of its io_context. Calls exactly one of the callbacks `on_connected` and `on_failed`, once.
class Connector : public std::enable_shared_from_this<Connector> {
 public:
  using OnConnected = std::function<void(std::shared_ptr<Connection>)>;
  using OnFailed = std::function<void(const Error&)>;
  using Time = std::chrono::steady_clock::time_point;

  /// The first message to send. If `port` is not 0, the message is sent only to this port, instead of the ports of the
  /// endpoints.
  struct FirstMessage {
    std::string message;
    uint16_t port = 0;
  };
  /// Called at each attempt. It returns nothing while there is no message yet; `no_message_reason` is then the reason
  /// in messages. `rank_name` names this rank in messages: "rank 3".
  using FirstMessageSource = std::function<std::optional<FirstMessage>()>;
  Connector(boost::asio::io_context& io, std::vector<boost::asio::ip::tcp::endpoint> endpoints,
            FirstMessageSource first_message, std::string no_message_reason, Time deadline, std::string rank_name);
  void start(OnConnected on_connected, OnFailed on_failed);
  void stop();

 private:
  void try_endpoint(std::size_t index);
  void request_to_join(std::size_t index, boost::asio::ip::tcp::socket socket, const std::string& message);
  void try_next(std::size_t index, const std::string& problem);
  void fail(const Error& failure);

  boost::asio::io_context& io_;
  const std::vector<boost::asio::ip::tcp::endpoint> endpoints_;
  const FirstMessageSource first_message_;
  const std::string no_message_reason_, rank_name_;
  const Time deadline_;
  boost::asio::steady_timer timer_;
  OnConnected on_connected_;
  OnFailed on_failed_;
  boost::asio::ip::tcp::endpoint endpoint_;
  std::string rejection_;                       // the reason of the last store that rejected this rank, or ""
  boost::asio::ip::tcp::endpoint rejected_by_;  // that store
  std::shared_ptr<Connection> connection_;
  std::shared_ptr<boost::asio::ip::tcp::socket> socket_;
  uint64_t attempt_ = 0;  // number of the current attempt; handlers of earlier attempts do nothing
  bool finished_ = false;
};

/// Every address of `host` combined with each port. Retries until the deadline, then throws EnvironmentError.
std::vector<boost::asio::ip::tcp::endpoint> resolve(const std::string& host, const std::vector<uint16_t>& ports,
                                                    Connector::Time deadline);

}  // namespace zr::host::control
