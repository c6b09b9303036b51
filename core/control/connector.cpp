#include "control/connector.hpp"

#include <thread>
#include <utility>

namespace zr::host::control {

using boost::asio::ip::tcp;
using boost::system::error_code;
using protocol::Type;

namespace {
constexpr auto kPatience = std::chrono::seconds(2);     // time limit per address
constexpr auto kPause = std::chrono::milliseconds(20);  // pause before all addresses are tried again
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
      fail_environment("cannot resolve '" + host + "', the address of the job's store: " + error.message() +
                       ". It comes from MASTER_ADDR, ZR_STORE or the launcher's node list: give a host name that all "
                       "ranks can reach");
    std::this_thread::sleep_for(kResolvePause);
  }
}

Connector::Connector(boost::asio::io_context& io, std::vector<tcp::endpoint> endpoints, Hello hello,
                     std::string no_hello, Time deadline, std::string who)
    : io_(io),
      endpoints_(std::move(endpoints)),
      hello_(std::move(hello)),
      no_hello_(std::move(no_hello)),
      who_(std::move(who)),
      deadline_(deadline),
      timer_(io) {}

void Connector::start(Welcomed welcomed, Failed failed) {
  welcomed_ = std::move(welcomed);
  failed_ = std::move(failed);
  attempt(0);
}

void Connector::stop() {
  over_ = true;
  timer_.cancel();
  if (connection_) connection_->close();
  if (socket_) {
    error_code ignored;
    socket_->close(ignored);
  }
  welcomed_ = nullptr;
  failed_ = nullptr;
}

void Connector::fail(const Error& failure) {
  const Failed failed = std::move(failed_);
  stop();
  failed(failure);
}

void Connector::attempt(std::size_t index) {
  tried_ = endpoints_[index];
  const auto hello = hello_();
  if (!hello) return next(index, no_hello_);
  if (hello->port) tried_.port(hello->port);
  const auto self = shared_from_this();
  const uint64_t mine = ++attempt_;
  socket_ = std::make_shared<tcp::socket>(io_);
  timer_.expires_after(kPatience);
  timer_.async_wait([this, self, mine, index](const error_code& error) {
    if (!error && !over_ && mine == attempt_) next(index, "no answer");
  });
  socket_->async_connect(
      tried_, [this, self, mine, index, socket = socket_, message = hello->message](const error_code& error) {
        if (over_ || mine != attempt_) return;
        if (error == boost::asio::error::network_unreachable && endpoints_[index].address().is_loopback())
          return fail(EnvironmentError(who_ + " cannot reach the job's store at " +
                                       endpoints_[index].address().to_string() + ": " + error.message() +
                                       "; the loopback interface is down: enable it with `ip link set lo up`"));
        if (error) return next(index, error.message());
        greet(index, std::move(*socket), message);
      });
}

void Connector::greet(std::size_t index, tcp::socket socket, const std::string& message) {
  const auto self = shared_from_this();
  const uint64_t mine = attempt_;
  connection_ = std::make_shared<Connection>(std::move(socket));
  connection_->start(
      [this, self, mine, index](Type type, std::string_view body) {
        if (over_ || mine != attempt_) return;
        if (type == Type::welcome) {
          over_ = true;
          timer_.cancel();
          failed_ = nullptr;
          return std::exchange(welcomed_, nullptr)(std::exchange(connection_, nullptr));
        }
        if (type != Type::reject) throw protocol::Malformed("neither welcome nor reject");
        protocol::Reader reader(body);
        const int code = reader.u8();
        const std::string text = reader.text();
        if (code == exit_code::peer_lost) return fail(PeerLostError(text));
        if (code == exit_code::environment) return fail(EnvironmentError(text));
        next(index, text);
      },
      [this, self, mine, index] {
        if (!over_ && mine == attempt_) next(index, "it closed the connection");
      },
      protocol::kMaxBytes);
  connection_->send(message);
}

void Connector::next(std::size_t index, const std::string& why) {
  ++attempt_;
  why_ = why;
  if (connection_) std::exchange(connection_, nullptr)->close();
  if (socket_) {
    error_code ignored;
    std::exchange(socket_, nullptr)->close(ignored);
  }
  if (std::chrono::steady_clock::now() >= deadline_)
    return fail(EnvironmentError(
        who_ + " cannot find the store of its job at " + tried_.address().to_string() + " port " +
        (endpoints_.front().port() == endpoints_.back().port()
             ? std::to_string(tried_.port())
             : std::to_string(endpoints_.front().port()) + " to " + std::to_string(endpoints_.back().port())) +
        ": " + why_ +
        ". Check that rank 0, which runs the store, is running, and that this is its address; to use another "
        "address, set ZR_STORE=host:port to the same value on every rank"));
  if (index + 1 < endpoints_.size()) return attempt(index + 1);
  timer_.expires_after(kPause);
  timer_.async_wait([this, self = shared_from_this(), mine = attempt_](const error_code& error) {
    if (!error && !over_ && mine == attempt_) attempt(0);
  });
}

}  // namespace zr::host::control
