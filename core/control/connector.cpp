#include "control/connector.hpp"

#include <fmt/format.h>

#include <thread>
#include <utility>

namespace zr::host::control {

using boost::asio::ip::tcp;
using boost::system::error_code;
using protocol::Type;

namespace {
constexpr auto kEndpointTimeout = std::chrono::seconds(2);           // time limit per address
constexpr auto kPauseBetweenRounds = std::chrono::milliseconds(20);  // pause before all addresses are tried again
constexpr auto kResolvePause = std::chrono::milliseconds(200);
}  // namespace

std::vector<tcp::endpoint> resolve(const std::string& host, const std::vector<uint16_t>& ports,
                                   Connector::Time deadline) {
  boost::asio::io_context io;
  tcp::resolver resolver(io);
  for (;;) {
    error_code error;
    const auto found = resolver.resolve(host, "", error);
    std::vector<tcp::endpoint> endpoints;
    for (const uint16_t port : ports)
      for (const auto& entry : found) endpoints.emplace_back(entry.endpoint().address(), port);
    if (!endpoints.empty()) return endpoints;
    if (std::chrono::steady_clock::now() + kResolvePause > deadline)
      fail_environment(
          fmt::format("cannot resolve '{}', the address of the job's store: {}. It comes from MASTER_ADDR, ZR_STORE, "
                      "zr::Rendezvous or the launcher's node list: give a host name that all ranks can reach",
                      host, error.message()));
    std::this_thread::sleep_for(kResolvePause);
  }
}

Connector::Connector(boost::asio::io_context& io, std::vector<tcp::endpoint> endpoints,
                     FirstMessageSource first_message, std::string no_message_reason, Time deadline,
                     std::string rank_name)
    : io_(io),
      endpoints_(std::move(endpoints)),
      first_message_(std::move(first_message)),
      no_message_reason_(std::move(no_message_reason)),
      rank_name_(std::move(rank_name)),
      deadline_(deadline),
      timer_(io) {}

void Connector::start(OnConnected on_connected, OnFailed on_failed) {
  on_connected_ = std::move(on_connected);
  on_failed_ = std::move(on_failed);
  try_endpoint(0);
}

void Connector::stop() {
  finished_ = true;
  timer_.cancel();
  if (connection_) connection_->close();
  if (socket_) {
    error_code ignored;
    socket_->close(ignored);
  }
  on_connected_ = nullptr;
  on_failed_ = nullptr;
}

void Connector::fail(const Error& failure) {
  const OnFailed on_failed = std::move(on_failed_);
  stop();
  on_failed(failure);
}

void Connector::try_endpoint(std::size_t index) {
  endpoint_ = endpoints_[index];
  const auto first_message = first_message_();
  if (!first_message) return try_next(index, no_message_reason_);
  if (first_message->port) endpoint_.port(first_message->port);
  const auto self = shared_from_this();
  const uint64_t this_attempt = ++attempt_;
  socket_ = std::make_shared<tcp::socket>(io_);
  timer_.expires_after(kEndpointTimeout);
  timer_.async_wait([this, self, this_attempt, index](const error_code& error) {
    if (!error && !finished_ && this_attempt == attempt_) try_next(index, "no answer");
  });
  socket_->async_connect(endpoint_, [this, self, this_attempt, index, socket = socket_,
                                     message = first_message->message](const error_code& error) {
    if (finished_ || this_attempt != attempt_) return;
    if (error == boost::asio::error::network_unreachable && endpoints_[index].address().is_loopback())
      return fail(
          EnvironmentError(fmt::format("{} cannot reach the job's store at {}: {}; the loopback interface is down: "
                                       "enable it with `ip link set lo up`",
                                       rank_name_, endpoints_[index].address().to_string(), error.message())));
    if (error) return try_next(index, error.message());
    request_to_join(index, std::move(*socket), message);
  });
}

void Connector::request_to_join(std::size_t index, tcp::socket socket, const std::string& message) {
  const auto self = shared_from_this();
  const uint64_t this_attempt = attempt_;
  connection_ = std::make_shared<Connection>(std::move(socket));
  connection_->start(
      [this, self, this_attempt, index](Type type, std::string_view body) {
        if (finished_ || this_attempt != attempt_) return;
        if (type == Type::welcome) {
          finished_ = true;
          timer_.cancel();
          on_failed_ = nullptr;
          return std::exchange(on_connected_, nullptr)(std::exchange(connection_, nullptr));
        }
        if (type != Type::reject) throw protocol::Malformed("neither welcome nor reject");
        protocol::Reader reader(body);
        const int code = reader.u8();
        const std::string text = reader.text();
        if (code == exit_code::peer_lost) return fail(PeerLostError(text));
        if (code == exit_code::environment) return fail(EnvironmentError(text));
        rejection_ = text;
        rejected_by_ = endpoint_;
        try_next(index, text);
      },
      [this, self, this_attempt, index] {
        if (!finished_ && this_attempt == attempt_) try_next(index, "it closed the connection");
      },
      protocol::kMaxBytes);
  connection_->send(message);
}

void Connector::try_next(std::size_t index, const std::string& problem) {
  ++attempt_;
  if (connection_) std::exchange(connection_, nullptr)->close();
  if (socket_) {
    error_code ignored;
    std::exchange(socket_, nullptr)->close(ignored);
  }
  if (std::chrono::steady_clock::now() >= deadline_)
    return fail(EnvironmentError(fmt::format(
        "{} cannot find the store of its job at {} port {}: {}. Check that rank 0, which runs the store, is running, "
        "and that this is its address; to use another address, set ZR_STORE=host:port to the same value on every rank",
        rank_name_, endpoint_.address().to_string(),
        endpoints_.front().port() == endpoints_.back().port()
            ? std::to_string(endpoint_.port())
            : fmt::format("{} to {}", endpoints_.front().port(), endpoints_.back().port()),
        rejection_.empty() || rejection_ == problem
            ? problem
            : fmt::format("{}, and at {} port {}: {}", problem, rejected_by_.address().to_string(), rejected_by_.port(),
                          rejection_))));
  if (index + 1 < endpoints_.size()) return try_endpoint(index + 1);
  timer_.expires_after(kPauseBetweenRounds);
  timer_.async_wait([this, self = shared_from_this(), this_attempt = attempt_](const error_code& error) {
    if (!error && !finished_ && this_attempt == attempt_) try_endpoint(0);
  });
}

}  // namespace zr::host::control
