// Finds the job's store: tries its addresses until one welcomes this rank.
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

#include "base/failure.hpp"
#include "control/connection.hpp"

namespace zr::host {

/// Runs on the thread of its io_context. Calls one of the two once.
class Connector : public std::enable_shared_from_this<Connector> {
 public:
  using Welcomed = std::function<void(std::shared_ptr<Connection>)>;
  using Failed = std::function<void(const Failure&)>;
  using Time = std::chrono::steady_clock::time_point;

  /// The message to greet with, and the port that alone may hear it, in place of the endpoints'; 0: theirs.
  struct Greeting {
    std::string message;
    uint16_t port = 0;
  };
  /// `hello` is asked at each attempt; nothing: there is none yet, and `no_hello` says why. `who`: "rank 3", for
  /// messages.
  using Hello = std::function<std::optional<Greeting>()>;
  Connector(boost::asio::io_context& io, std::vector<boost::asio::ip::tcp::endpoint> endpoints, Hello hello,
            std::string no_hello, Time deadline, std::string who);
  void start(Welcomed welcomed, Failed failed);
  void stop();

 private:
  void attempt(std::size_t index);
  void greet(std::size_t index, boost::asio::ip::tcp::socket socket, const std::string& message);
  void next(std::size_t index, const std::string& why);
  void fail(const Failure& failure);

  boost::asio::io_context& io_;
  const std::vector<boost::asio::ip::tcp::endpoint> endpoints_;
  const Hello hello_;
  const std::string no_hello_, who_;
  const Time deadline_;
  boost::asio::steady_timer timer_;
  Welcomed welcomed_;
  Failed failed_;
  boost::asio::ip::tcp::endpoint tried_;
  std::string why_;  // the last attempt failed
  std::shared_ptr<Connection> connection_;
  std::shared_ptr<boost::asio::ip::tcp::socket> socket_;
  uint64_t attempt_ = 0;  // handlers of earlier ones do nothing
  bool over_ = false;
};

/// Every address of `host` with each port; asks again until the deadline. Throws Failure(environment).
std::vector<boost::asio::ip::tcp::endpoint> resolve(const std::string& host, const std::vector<uint16_t>& ports,
                                                    Connector::Time deadline);

}  // namespace zr::host
