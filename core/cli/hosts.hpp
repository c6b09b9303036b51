// The hosts of a job, and the address at which they reach the job's store on this machine.
#pragma once

#include <boost/asio/ip/address.hpp>
#include <cstdint>
#include <string>
#include <vector>

namespace boost::asio {
class io_context;
}

namespace zr::host::cli {

struct HostRanks {
  std::string host;  // a name or an IPv4 address
  int ranks = 1;
};

/// Parses the value of an option --hosts: "node01:4,node02:4", or "@FILE" for a file with a host in each line, as
/// node01:4 or "node01 slots=4". A host without a number has one rank. Throws UserError, which names the command.
std::vector<HostRanks> parse_hosts(const std::string& command, const std::string& text);
/// The ranks of each host: as parse_hosts() accepts them, or "16x8" for 16 hosts of 8 ranks. Throws as it does.
std::vector<int32_t> parse_host_sizes(const std::string& command, const std::string& text);
/// The ranks of all hosts.
int ranks_of(const std::vector<HostRanks>& hosts);

/// The address of the store: as the ranks connect to it, and to listen on.
struct StoreAddress {
  std::string name;
  boost::asio::ip::address address;
  uint16_t port = 0;  // 0: any
};
/// The address in ZR_STORE, if it is set; else the address of this machine from which the first other host is reached,
/// and 127.0.0.1 if there is no other. Throws EnvironmentError if a host is unknown or cannot be reached.
StoreAddress store_address(boost::asio::io_context& io, const std::vector<HostRanks>& hosts);

}  // namespace zr::host::cli
