// A framed connection of the control plane, one end of a TCP socket. For the thread that runs its io_context only.
#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "control/protocol.hpp"

namespace zr::host {

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using OnMessage = std::function<void(protocol::Type, std::string_view body)>;
  using OnClosed = std::function<void()>;

  explicit Connection(boost::asio::ip::tcp::socket socket);  // connected
  /// Starts to read. on_message may throw protocol::Malformed: then the connection closes. on_closed is called once,
  /// when the peer or an error closed it; not after close(). Messages above `most` bytes are malformed.
  void start(OnMessage on_message, OnClosed on_closed, uint32_t most);
  /// Other callbacks and limit from the next message on.
  void hand_over(OnMessage on_message, OnClosed on_closed, uint32_t most);
  /// A peer that does not read until 64 MiB wait for it is closed, as by an error.
  void send(std::string message);
  /// No more is sent after what is queued; on_closed follows when the peer has closed too.
  void finish();
  void close();

 private:
  void read_header();
  void read_body(protocol::Type type, uint32_t bytes);
  void write_next();
  void fail();

  boost::asio::ip::tcp::socket socket_;
  OnMessage on_message_;
  OnClosed on_closed_;
  uint32_t most_ = 0;
  std::array<char, protocol::kHeaderBytes> header_{};
  std::string body_;
  std::deque<std::string> queue_;
  std::size_t queued_ = 0;  // bytes
  bool finishing_ = false, closed_ = false;
};

/// Keeps a socket out of programs that this process starts.
void close_on_exec(int fd);

}  // namespace zr::host
