// Which rank this process is, and where its job's store is: read from the variables that launchers set.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace zr::host {

struct RankInfo {
  std::string launcher;  // "zeroth launch", "torchrun", "mpirun", "srun": for messages
  int rank = 0, world = 1;
  int local_rank = -1, local_world = -1;  // -1: to be counted from the ranks' hosts
  std::string address;                    // of the store
  std::vector<uint16_t> ports;            // the store listens on the first of these that was free
  bool launched = false;                  // by zeroth launch, which keeps the store
  bool hosts_store = false;               // this rank keeps the store
  std::string job;
  std::string token;           // what a rank shows to the store
  bool shares_secret = false;  // token is empty: rank 0 makes one, and passes it on in a file (JobSecret)
  bool guessable = false;      // token is made of the launcher's variables, which other users may know
};

/// A variable's value, or null.
using Variables = std::function<const char*(const char* name)>;

/// Nothing if no launcher's variables are there. `parent` is this process's parent, which mpiexec's ranks have in
/// common. Throws Failure(environment) naming variable and remedy.
std::optional<RankInfo> find_rank_info(const Variables& variables, int64_t parent);

/// The first name of a node list: "node[01-04,07],x3" -> "node01".
std::string first_host(const std::string& nodes);

}  // namespace zr::host
