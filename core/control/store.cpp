#include "control/store.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <map>
#include <optional>

#include "base/error.hpp"
#include "base/text.hpp"
#include "control/connection.hpp"
#include "control/members.hpp"

namespace zr::host::control {

using boost::asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;
using protocol::Type;

namespace {
constexpr auto kFinalStatusTimeout = std::chrono::seconds(1);
constexpr auto kJoinRequestTimeout = std::chrono::seconds(5);
constexpr auto kPoll = std::chrono::milliseconds(10);
constexpr auto kWatch = std::chrono::milliseconds(500);
constexpr std::size_t kMaxPendingConnections = 256;
// Limits on what peers can make the store hold. The largest use is the description of a checkpoint, a few MiB per rank.
constexpr std::size_t kMaxValueBytesOfRank = 64u << 20;
constexpr std::size_t kMaxValueBytesOfAll = 512u << 20;
constexpr std::size_t kOverheadOfValue = 256;  // the map node and the string objects
constexpr std::size_t kMaxGetsOfRank = 4096;   // pending gets

// Compares in a time that does not depend on the position of the first difference.
bool same_secret(const std::string& a, const std::string& b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}
}  // namespace

struct Store::State : std::enable_shared_from_this<State> {
  State(boost::asio::io_context& context, Options given)
      : io(context),
        acceptor(context),
        poll(context),
        watch_timer(context),
        options(std::move(given)),
        members(options.world, options.launched, protocol::this_peer().machine) {}

  struct Rank {
    std::shared_ptr<Connection> connection;
    std::map<uint64_t, std::string> pending_gets;  // ids and keys of pending gets
  };
  struct PendingConnection {
    std::shared_ptr<Connection> connection;
    std::shared_ptr<boost::asio::steady_timer> timeout;
  };

  void listen(const boost::asio::ip::address& address, const std::vector<uint16_t>& ports);
  void accept();
  void close_oldest_pending();
  void receive_join_request(tcp::socket socket);
  void handle_join_request(std::shared_ptr<Connection> connection, const protocol::JoinRequest& request);
  void admit(int rank, const std::shared_ptr<Connection>& connection);
  void message(int rank, Type type, std::string_view body);
  void put(int rank, std::string key, std::string value);
  void drop(const std::string& key);
  void get(int rank, uint64_t id, std::string key);
  void check_for_failure();
  void await_failure_report();
  void watch();
  void close();
  void send_to_all(const std::string& message) {
    for (auto& [rank, peer] : ranks) peer.connection->send(message);
  }

  boost::asio::io_context& io;
  tcp::acceptor acceptor;
  boost::asio::steady_timer poll, watch_timer;
  Options options;
  Members members;
  std::map<int, Rank> ranks;  // connected ranks
  std::map<Connection*, PendingConnection> pending_connections;
  struct Value {
    std::string bytes;
    int rank = 0;  // the rank that put it
  };
  std::map<std::string, Value> values;
  std::map<int, std::size_t> bytes_of_rank;  // memory of the values that each rank put
  std::size_t bytes_of_values = 0;
  std::optional<Clock::time_point> failed_at;
  std::string failure_report;
  bool detects_failures = true;
  bool has_one_port = false;  // at which ranks look for the store
  std::function<void()> on_all_disconnected;
};

void Store::State::listen(const boost::asio::ip::address& address, const std::vector<uint16_t>& ports) {
  has_one_port = ports.size() == 1;
  error_code error;
  for (const uint16_t port : ports) {
    const tcp::endpoint endpoint(address, port);
    acceptor.open(endpoint.protocol(), error);
    if (error) break;
    close_on_exec(acceptor.native_handle());
    acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(tcp::acceptor::max_listen_connections, error);
    if (!error) {
      accept();
      return watch();
    }
    error_code ignored;
    acceptor.close(ignored);
  }
  fail_environment(
      fmt::format("cannot listen for the job's ranks on {} port {}{}: {}. Choose a free port on rank 0's node and set "
                  "ZR_STORE=host:port on every rank",
                  address.to_string(), ports.front(), ports.size() > 1 ? fmt::format(" to {}", ports.back()) : "",
                  error.message()));
}

void Store::State::accept() {
  acceptor.async_accept([this, self = shared_from_this()](const error_code& error, tcp::socket socket) {
    if (!acceptor.is_open()) return;
    if (!error && pending_connections.size() == kMaxPendingConnections) close_oldest_pending();
    if (!error) receive_join_request(std::move(socket));
    if (!error) return accept();
    poll.expires_after(std::chrono::milliseconds(100));  // out of file descriptors: retry later
    poll.async_wait([this, self](const error_code&) {
      if (acceptor.is_open()) accept();
    });
  });
}

// A rank presents its token at once, so it is not the oldest, however many connections others hold.
void Store::State::close_oldest_pending() {
  const auto oldest = std::min_element(
      pending_connections.begin(), pending_connections.end(),
      [](const auto& a, const auto& b) { return a.second.timeout->expiry() < b.second.timeout->expiry(); });
  oldest->second.connection->close();
  oldest->second.timeout->cancel();
  pending_connections.erase(oldest);
}

void Store::State::receive_join_request(tcp::socket socket) {
  auto connection = std::make_shared<Connection>(std::move(socket));
  auto timeout = std::make_shared<boost::asio::steady_timer>(io, kJoinRequestTimeout);
  pending_connections[connection.get()] = {connection, timeout};
  const auto forget_connection = [this, self = shared_from_this(), key = connection.get()] {
    pending_connections.erase(key);
  };
  timeout->async_wait([this, forget_connection, connection](const error_code& error) {
    if (error || !pending_connections.contains(connection.get())) return;  // admitted meanwhile
    connection->close();
    forget_connection();
  });
  connection->start(
      [this, self = shared_from_this(), key = connection.get()](Type type, std::string_view body) {
        if (type != Type::join_request) throw protocol::Malformed("expected a join request first");
        const auto at = pending_connections.find(key);
        if (at != pending_connections.end())
          handle_join_request(at->second.connection, protocol::decode_join_request(body));
      },
      forget_connection, protocol::kMaxJoinRequestBytes);
}

void Store::State::handle_join_request(std::shared_ptr<Connection> connection, const protocol::JoinRequest& request) {
  const auto reject = [&](int code, const std::string& text) {  // the connection stays pending until its timeout
    // Ranks of other jobs, which look for their store at several ports, try this one too.
    if (request.job == options.job || has_one_port) members.refused(text);
    connection->send(protocol::Writer().u8(static_cast<uint8_t>(code)).text(text).message(Type::reject));
    connection->finish();
  };
  if (request.job != options.job || !same_secret(request.token, options.token))
    return reject(0, "this store belongs to another job, or the ranks have different values of ZR_TOKEN");
  if (failed_at)
    return reject(exit_code::peer_lost, failure_report.empty() ? members.failure_notice() : failure_report);
  const std::string reason = members.admit(request, Clock::now());
  if (!reason.empty()) return reject(exit_code::environment, reason);
  pending_connections.erase(connection.get());
  admit(static_cast<int>(request.rank), connection);
}

void Store::State::admit(int rank, const std::shared_ptr<Connection>& connection) {
  const auto self = shared_from_this();
  connection->set_callbacks([this, self, rank](Type type, std::string_view body) { message(rank, type, body); },
                            [this, self, rank] {
                              ranks.erase(rank);
                              members.disconnected(rank);
                              check_for_failure();
                              if (on_all_disconnected && ranks.empty()) std::exchange(on_all_disconnected, nullptr)();
                            },
                            protocol::kMaxBytes);
  ranks[rank].connection = connection;
  connection->send(protocol::Writer().message(Type::welcome));
  if (members.all_joined()) send_to_all(protocol::encode(protocol::Start{options.job_id, members.peers()}));
  check_for_failure();
}

void Store::State::message(int rank, Type type, std::string_view body) {
  protocol::Reader reader(body);
  members.on_message(rank, Clock::now());
  switch (type) {
    case Type::put: {
      auto key = reader.text(protocol::kMaxKeyBytes);
      put(rank, std::move(key), reader.text(protocol::kMaxValueBytes));
      return reader.end();
    }
    case Type::drop: drop(reader.text(protocol::kMaxKeyBytes)); return reader.end();
    case Type::get: {
      const auto id = reader.u64();
      get(rank, id, reader.text(protocol::kMaxKeyBytes));
      return reader.end();
    }
    case Type::heartbeat:
      members.on_heartbeat(rank, protocol::decode_heartbeat(body), Clock::now());
      ranks[rank].connection->send(
          protocol::Writer().i64(members.longest_silence_ms(Clock::now())).message(Type::pong));
      return check_for_failure();
    case Type::final_status:
      members.on_final_status(rank, protocol::decode_heartbeat(body), Clock::now());
      return check_for_failure();
    case Type::report:
      members.reported(rank, printable(reader.text(protocol::kMaxReportBytes), "\n\t"));
      return check_for_failure();
    default: throw protocol::Malformed("not a message to the store");
  }
}

void Store::State::put(int rank, std::string key, std::string value) {
  const auto at = values.find(key);
  const std::size_t before = at == values.end() ? 0 : key.size() + at->second.bytes.size() + kOverheadOfValue;
  const std::size_t bytes = key.size() + value.size() + kOverheadOfValue;
  std::size_t& bytes_of_this_rank = bytes_of_rank[rank];
  const std::size_t freed = at != values.end() && at->second.rank == rank ? before : 0;
  if (bytes_of_this_rank - freed + bytes > kMaxValueBytesOfRank ||
      bytes_of_values - before + bytes > kMaxValueBytesOfAll) {
    const bool over_rank_limit = bytes_of_this_rank - freed + bytes > kMaxValueBytesOfRank;
    members.reported(
        rank,
        fmt::format("the job's store is full: cannot put '{}', because {}; put less data, or put \"\" under keys that "
                    "every rank has read",
                    key,
                    over_rank_limit ? "the values of one rank may use at most " + bytes_text(kMaxValueBytesOfRank)
                                    : "the values of all ranks may use at most " + bytes_text(kMaxValueBytesOfAll)));
    return check_for_failure();
  }
  if (at != values.end()) bytes_of_rank[at->second.rank] -= before;
  bytes_of_this_rank += bytes;
  bytes_of_values += bytes - before;
  for (auto& [rank, peer] : ranks)
    for (auto at = peer.pending_gets.begin(); at != peer.pending_gets.end();) {
      if (at->second != key) {
        ++at;
        continue;
      }
      peer.connection->send(protocol::Writer().u64(at->first).text(value).message(Type::value));
      at = peer.pending_gets.erase(at);
    }
  values[std::move(key)] = {std::move(value), rank};
}

void Store::State::drop(const std::string& key) {
  const auto at = values.find(key);
  if (at == values.end()) return;
  const std::size_t freed = key.size() + at->second.bytes.size() + kOverheadOfValue;
  bytes_of_rank[at->second.rank] -= freed;
  bytes_of_values -= freed;
  values.erase(at);
}

void Store::State::get(int rank, uint64_t id, std::string key) {
  const auto at = values.find(key);
  if (at != values.end())
    return ranks[rank].connection->send(protocol::Writer().u64(id).text(at->second.bytes).message(Type::value));
  auto& pending_gets = ranks[rank].pending_gets;
  if (pending_gets.size() >= kMaxGetsOfRank) throw protocol::Malformed("too many pending gets");
  pending_gets[id] = std::move(key);
}

void Store::State::check_for_failure() {
  if (failed_at || !detects_failures || !members.broken()) return;
  failed_at = Clock::now();
  send_to_all(protocol::Writer().text(members.failure_notice()).message(Type::failure_notice));
  await_failure_report();
}

void Store::State::await_failure_report() {
  const auto now = Clock::now();
  if (!members.report_is_ready(*failed_at, now) && now - *failed_at < kFinalStatusTimeout) {
    poll.expires_after(kPoll);
    poll.async_wait([this, self = shared_from_this()](const error_code& error) {
      if (!error) await_failure_report();
    });
    return;
  }
  failure_report = members.failure_report(now);
  if (options.on_failure_report) options.on_failure_report(failure_report);
  send_to_all(protocol::Writer().text(failure_report).message(Type::failure_report));
}

void Store::State::watch() {
  members.detect_dead_ranks(Clock::now());
  members.detect_endless_waits(Clock::now());
  check_for_failure();
  watch_timer.expires_after(kWatch);
  watch_timer.async_wait([this, self = shared_from_this()](const error_code& error) {
    if (!error) watch();
  });
}

void Store::State::close() {
  error_code ignored;
  acceptor.close(ignored);
  poll.cancel();
  watch_timer.cancel();
  for (auto& [key, pending] : pending_connections) {
    pending.connection->close();
    pending.timeout->cancel();
  }
  for (auto& [rank, peer] : ranks) peer.connection->close();
  pending_connections.clear();
  ranks.clear();
  on_all_disconnected = nullptr;
}

Store::Store(boost::asio::io_context& io, Options options, const boost::asio::ip::address& address,
             const std::vector<uint16_t>& ports)
    : state_(std::make_shared<State>(io, std::move(options))) {
  state_->listen(address, ports);
}

Store::~Store() { close(); }

uint16_t Store::port() const { return state_->acceptor.local_endpoint().port(); }

void Store::started(int rank, int64_t pid) { state_->members.started(rank, pid); }

void Store::ended(int rank, int64_t pid, const ExitStatus& exit_status) {
  if (!state_->detects_failures) return;
  state_->members.ended(rank, pid, exit_status);
  state_->check_for_failure();
}

bool Store::joined(int rank) const { return state_->members.joined(rank); }
std::string Store::value(const std::string& key) const {
  const auto at = state_->values.find(key);
  return at == state_->values.end() ? "" : at->second.bytes;
}
std::size_t Store::bytes() const { return state_->bytes_of_values; }
bool Store::broken() const { return state_->failed_at.has_value(); }
bool Store::has_silent_ranks() const {
  for (int rank = 0; rank < state_->options.world; ++rank)
    if (state_->members.has_long_been_silent(rank, Clock::now())) return true;
  return false;
}
void Store::request_stop(int signal) {
  state_->send_to_all(protocol::Writer().u8(static_cast<uint8_t>(signal)).message(Type::stop));
}
int64_t Store::process_of(int rank) const { return state_->members.process_of(rank); }
void Store::stop_failure_detection() { state_->detects_failures = false; }
void Store::resume_failure_detection() {
  state_->detects_failures = true;
  state_->check_for_failure();
}

void Store::finish(const protocol::Heartbeat& store_host, std::function<void()> then) {
  state_->detects_failures = false;
  error_code ignored;
  state_->acceptor.close(ignored);
  for (auto& [rank, peer] : state_->ranks) {
    peer.connection->send(protocol::encode(Type::goodbye, store_host));
    peer.connection->finish();
  }
  if (state_->ranks.empty()) return then();
  state_->on_all_disconnected = std::move(then);
}

void Store::close() { state_->close(); }

}  // namespace zr::host::control
