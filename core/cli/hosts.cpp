#include "cli/hosts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/udp.hpp>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <optional>
#include <sstream>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/path.hpp"
#include "base/text.hpp"
#include "control/environment.hpp"

namespace zr::host::cli {

namespace asio = boost::asio;
using boost::system::error_code;

namespace {
constexpr int kMaxRanksOnHosts = 4096;

std::optional<asio::ip::address> resolved(asio::io_context& io, const std::string& host) {
  error_code error;
  asio::ip::tcp::resolver resolver(io);
  for (const auto& entry : resolver.resolve(host, "", error)) return entry.endpoint().address();
  return {};
}

// The address from which this machine reaches `remote`; connecting a datagram socket sends nothing.
std::optional<asio::ip::address> local_address_towards(asio::io_context& io, const asio::ip::address& remote) {
  error_code error;
  asio::ip::udp::socket socket(io);
  socket.connect(asio::ip::udp::endpoint(remote, 9), error);
  const auto local = error ? asio::ip::udp::endpoint() : socket.local_endpoint(error);
  if (error) return {};
  return local.address();
}

constexpr const char* kStoreRemedy =
    "set ZR_STORE=host:port to an address of this machine that all hosts reach, and a free port";

StoreAddress store_from_user(asio::io_context& io, const std::string& text) {
  StoreAddress store;
  const control::HostPort given = control::parse_store_address(text);
  store.name = given.host;
  store.port = given.port;
  const auto address = resolved(io, store.name);
  if (!address) fail_environment(fmt::format("ZR_STORE={}: {} cannot be resolved; {}", text, store.name, kStoreRemedy));
  store.address = *address;
  return store;
}

using Fail = std::function<void(const std::string& problem)>;

HostRanks host_of(const std::string& entry, const std::string& number, const Fail& fail) {
  constexpr std::string_view kNameCharacters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_";
  HostRanks host{entry.substr(0, entry.find(':'))};
  const auto [stop, error] = std::from_chars(number.data(), number.data() + number.size(), host.ranks);
  if (host.host.empty() || host.host.find_first_not_of(kNameCharacters) != host.host.npos || host.host[0] == '-' ||
      error != std::errc() || stop != number.data() + number.size() || host.ranks < 1 || host.ranks > kMaxRanksOnHosts)
    fail(fmt::format("'{}' is not HOST or HOST:RANKS, such as node01:4", entry));
  return host;
}

void add(std::vector<HostRanks>& hosts, HostRanks host, const Fail& fail) {
  if (std::any_of(hosts.begin(), hosts.end(), [&](const HostRanks& other) { return other.host == host.host; }))
    fail(fmt::format("{} occurs twice; give it once, with all its ranks", host.host));
  hosts.push_back(std::move(host));
}

std::string ranks_text(const std::string& entry) {
  const auto colon = entry.find(':');
  return colon == entry.npos ? "1" : entry.substr(colon + 1);
}

// A line has HOST or HOST:RANKS or, as in a host file of OpenMPI, HOST slots=RANKS. # begins a comment.
std::vector<HostRanks> hosts_in(const std::string& file, const Fail& fail) {
  constexpr std::string_view kSlots = "slots=";
  std::vector<HostRanks> hosts;
  std::istringstream text(read_file(file));
  int number = 0;
  for (std::string line; std::getline(text, line);) {
    ++number;
    std::istringstream words(line.substr(0, line.find('#')));
    std::string entry, slots, more;
    if (!(words >> entry)) continue;
    const Fail fail_line = [&](const std::string& problem) { fail(fmt::format("line {}: {}", number, problem)); };
    const bool has_slots = static_cast<bool>(words >> slots);
    if ((has_slots && (!slots.starts_with(kSlots) || entry.find(':') != entry.npos)) || words >> more)
      fail_line(fmt::format("'{}' is not HOST:RANKS or HOST slots=RANKS", printable(line)));
    add(hosts, host_of(entry, has_slots ? slots.substr(kSlots.size()) : ranks_text(entry), fail_line), fail_line);
  }
  if (hosts.empty()) fail("the file has no hosts");
  return hosts;
}
}  // namespace

std::vector<HostRanks> parse_hosts(const std::string& command, const std::string& text) {
  const Fail fail = [&](const std::string& problem) {
    fail_user(fmt::format("zeroth {}: --hosts {}: {}", command, printable(text), problem));
  };
  std::vector<HostRanks> hosts;
  if (text == "@") fail("@ is followed by the name of a file with a host in each line");
  if (text.starts_with('@')) {
    hosts = hosts_in(with_home(text.substr(1)), fail);
  } else {
    for (std::size_t begin = 0; begin <= text.size();) {
      const auto end = std::min(text.find(',', begin), text.size());
      const std::string entry = text.substr(begin, end - begin);
      add(hosts, host_of(entry, ranks_text(entry), fail), fail);
      begin = end + 1;
    }
  }
  if (ranks_of(hosts) > kMaxRanksOnHosts) fail(fmt::format("{} ranks: at most {}", ranks_of(hosts), kMaxRanksOnHosts));
  return hosts;
}

std::vector<int32_t> parse_host_sizes(const std::string& command, const std::string& text) {
  const auto fail = [&](const std::string& problem) {
    fail_user(fmt::format("zeroth {}: --hosts {}: {}", command, printable(text), problem));
  };
  const auto cross = text.find('x');
  if (cross != text.npos && text.find_first_not_of("0123456789x") == text.npos) {
    int64_t hosts = 0, ranks = 0;
    const char *const middle = text.data() + cross, *const end = text.data() + text.size();
    const auto of_hosts = std::from_chars(text.data(), middle, hosts),
               of_ranks = std::from_chars(middle + 1, end, ranks);
    if (of_hosts.ec != std::errc() || of_hosts.ptr != middle || of_ranks.ec != std::errc() || of_ranks.ptr != end ||
        hosts < 1 || ranks < 1 || hosts > kMaxRanksOnHosts || ranks > kMaxRanksOnHosts ||
        hosts * ranks > kMaxRanksOnHosts)
      fail(fmt::format("is not HOSTSxRANKS with at most {} ranks, such as 16x8", kMaxRanksOnHosts));
    return std::vector<int32_t>(static_cast<std::size_t>(hosts), static_cast<int32_t>(ranks));
  }
  std::vector<int32_t> sizes;
  for (const HostRanks& host : parse_hosts(command, text)) {
    if (host.host.find_first_not_of("0123456789xX") == host.host.npos &&
        host.host.find_first_of("xX") != host.host.npos)
      fail(fmt::format("'{}' is not a host; give HOSTSxRANKS, such as 16x8, without other hosts", host.host));
    sizes.push_back(host.ranks);
  }
  return sizes;
}

int ranks_of(const std::vector<HostRanks>& hosts) {
  return std::accumulate(hosts.begin(), hosts.end(), 0,
                         [](int sum, const HostRanks& host) { return sum + host.ranks; });
}

StoreAddress store_address(asio::io_context& io, const std::vector<HostRanks>& hosts) {
  if (const char* set = std::getenv("ZR_STORE")) return store_from_user(io, set);
  StoreAddress store;
  store.address = asio::ip::address_v4::loopback();
  for (const HostRanks& host : hosts) {
    const auto remote = resolved(io, host.host);
    if (!remote)
      fail_environment(
          fmt::format("zeroth launch --hosts: {} cannot be resolved here; give a name or an IPv4 address "
                      "that this machine knows, or {}",
                      host.host, kStoreRemedy));
    const auto local = local_address_towards(io, *remote);
    if (!local)
      fail_environment(fmt::format("zeroth launch --hosts: this machine has no route to {} ({}); {}", host.host,
                                   remote->to_string(), kStoreRemedy));
    if (remote->is_loopback() || *local == *remote) continue;  // this machine
    store.address = *local;
    break;
  }
  store.name = store.address.to_string();
  return store;
}

}  // namespace zr::host::cli
