// Reads the rank of this process and the address of the job's store from the variables that launchers set.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zr/rendezvous.hpp"

namespace zr::host::control {

struct RankInfo {
  std::string launcher;  // for messages: "zeroth launch", "torchrun", "mpirun", "srun"
  int rank = 0, world = 1;
  int local_rank = -1, local_world = -1;  // -1: counted later from the ranks' hosts
  std::string address;                    // host name or IP address of the store
  std::vector<uint16_t> ports;            // the store listens on the first free port of these
  bool launched = false;                  // started by zeroth launch, which runs the store
  bool hosts_store = false;               // this rank runs the store
  std::string job;
  std::string token;           // what a rank presents to the store
  bool shares_secret = false;  // token is empty: rank 0 creates one and shares it in a file (JobSecret)
  bool guessable = false;      // token is derived from the launcher's variables, which other users may know
};

/// The address of a store as ZR_STORE has it.
struct HostPort {
  std::string host;  // a name or an IP address, without brackets
  uint16_t port = 0;
  /// "node01:29600"; an IPv6 address in brackets: "[::1]:29600".
  std::string text() const;
};
/// Reads that form; also an IPv6 address without brackets. Returns nothing for another text.
std::optional<HostPort> parse_address(const std::string& text);
/// The same. Throws EnvironmentError that names ZR_STORE.
HostPort parse_store_address(const std::string& text);

/// A variable's value, or null.
using Variables = std::function<const char*(const char* name)>;

/// Returns nothing if no launcher's variables are set. `parent` is the pid of this process's parent, which the ranks of
/// mpiexec have in common. `given` (or null) replaces all variables but those of `zeroth launch`, with which it must
/// agree, and ZR_TOKEN. Throws EnvironmentError naming variable and remedy; UserError if `given` is wrong.
std::optional<RankInfo> find_rank_info(const Variables& variables, int64_t parent, const Rendezvous* given = nullptr);

/// The launcher, other than `zeroth`, that has started several processes like this one ("srun"); "" if no launcher has.
/// What runs in a shell of `srun --pty` is not one of several. pid: of this process.
std::string launcher_of_several(const Variables& variables, int64_t pid);

/// For a process that starts the ranks of a job: throws UserError if a launcher has started several like it, each of
/// which would start a job.
void check_launched_once(const Variables& variables, int64_t pid);

/// Whether mpirun, or srun with PMI, has set this variable to tell this process its rank. The ranks that this process
/// starts must not inherit it: they would report to that launcher as the same rank.
bool tells_own_rank(const Variables& variables, std::string_view name);

/// The first name of a node list: "node[01-04,07],x3" -> "node01"; "" if it is malformed.
std::string first_host(const std::string& nodes);

}  // namespace zr::host::control
