#include "control/connection.hpp"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <utility>

namespace zr::host::control {

using boost::asio::ip::tcp;
using boost::system::error_code;

namespace {
constexpr std::size_t kMaxQueued = 64u << 20;
}

void close_on_exec(int fd) { fcntl(fd, F_SETFD, FD_CLOEXEC); }

Connection::Connection(tcp::socket socket) : socket_(std::move(socket)) {
  error_code ignored;
  close_on_exec(socket_.native_handle());
  socket_.set_option(tcp::no_delay(true), ignored);
}

void Connection::start(OnMessage on_message, OnClosed on_closed, uint32_t max_message_bytes) {
  set_callbacks(std::move(on_message), std::move(on_closed), max_message_bytes);
  read_header();
}

void Connection::set_callbacks(OnMessage on_message, OnClosed on_closed, uint32_t max_message_bytes) {
  on_message_ = std::move(on_message);
  on_closed_ = std::move(on_closed);
  max_message_bytes_ = max_message_bytes;
}

void Connection::read_header() {
  boost::asio::async_read(socket_, boost::asio::buffer(header_),
                          [this, self = shared_from_this()](const error_code& error, std::size_t) {
                            if (closed_) return;
                            if (error) return fail();
                            uint32_t bytes = 0;
                            for (int i = 3; i >= 0; --i) bytes = bytes << 8 | static_cast<uint8_t>(header_[size_t(i)]);
                            if (bytes > max_message_bytes_) return fail();
                            read_body(static_cast<protocol::Type>(header_[4]), bytes);
                          });
}

void Connection::read_body(protocol::Type type, uint32_t bytes) {
  body_.resize(bytes);
  boost::asio::async_read(socket_, boost::asio::buffer(body_),
                          [this, type, self = shared_from_this()](const error_code& error, std::size_t) {
                            if (closed_) return;
                            if (error) return fail();
                            try {
                              const OnMessage on_message = on_message_;  // it may call set_callbacks()
                              on_message(type, body_);
                            } catch (const protocol::Malformed&) {
                              return fail();
                            }
                            if (!closed_) read_header();
                          });
}

void Connection::send(std::string message) {
  if (closed_ || finishing_) return;
  queued_ += message.size();
  if (queued_ > kMaxQueued && !queue_.empty()) {
    finishing_ = true;
    error_code ignored;
    socket_.shutdown(tcp::socket::shutdown_both, ignored);  // the read side then gets end of file
    return;
  }
  queue_.push_back(std::move(message));
  if (queue_.size() == 1) write_next();
}

void Connection::write_next() {
  boost::asio::async_write(socket_, boost::asio::buffer(queue_.front()),
                           [this, self = shared_from_this()](const error_code& error, std::size_t) {
                             if (closed_) return;
                             if (error) return;  // the read side gets the error too, after the last bytes of the peer
                             queued_ -= queue_.front().size();
                             queue_.pop_front();
                             if (!queue_.empty()) return write_next();
                             error_code ignored;
                             if (finishing_) socket_.shutdown(tcp::socket::shutdown_send, ignored);
                           });
}

void Connection::finish() {
  finishing_ = true;
  error_code ignored;
  if (queue_.empty() && !closed_) socket_.shutdown(tcp::socket::shutdown_send, ignored);
}

void Connection::fail() {
  const OnClosed on_closed = std::move(on_closed_);
  close();
  if (on_closed) on_closed();
}

bool Connection::is_unacknowledged() {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  return ::getsockopt(socket_.native_handle(), IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 && info.tcpi_retransmits > 0;
}

void Connection::close() {
  closed_ = true;
  on_message_ = nullptr;
  on_closed_ = nullptr;
  error_code ignored;
  socket_.close(ignored);
}

}  // namespace zr::host::control
