// A framed TCP connection of the control plane. Use it only on the thread that runs its io_context.
#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "control/protocol.hpp"

namespace zr::host::control {

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using OnMessage = std::function<void(protocol::Type, std::string_view body)>;
  using OnClosed = std::function<void()>;

  explicit Connection(boost::asio::ip::tcp::socket socket);  // takes a connected socket
  /// Starts reading. If on_message throws protocol::Malformed, the connection closes. on_closed is called once, when
  /// the peer or an error closes the connection; it is not called after close(). Messages of more than
  /// `max_message_bytes` bytes are malformed.
  void start(OnMessage on_message, OnClosed on_closed, uint32_t max_message_bytes);
  /// Replaces the callbacks and the limit from the next message on.
  void set_callbacks(OnMessage on_message, OnClosed on_closed, uint32_t max_message_bytes);
  /// Queues a message. If more than 64 MiB are queued because the peer does not read, the connection closes as after an
  /// error.
  void send(std::string message);
  /// Sends the queued messages, then nothing more; on_closed is called when the peer has closed its side too.
  void finish();
  void close();
  /// True if the kernel sends data again, because the peer's kernel has not acknowledged it.
  bool is_unacknowledged();

 private:
  void read_header();
  void read_body(protocol::Type type, uint32_t bytes);
  void write_next();
  void fail();

  boost::asio::ip::tcp::socket socket_;
  OnMessage on_message_;
  OnClosed on_closed_;
  uint32_t max_message_bytes_ = 0;
  std::array<char, protocol::kHeaderBytes> header_{};
  std::string body_;
  std::deque<std::string> queue_;
  std::size_t queued_ = 0;  // bytes
  bool finishing_ = false, closed_ = false;
};

/// Sets FD_CLOEXEC, so that programs that this process starts do not inherit the socket.
void close_on_exec(int fd);

}  // namespace zr::host::control
