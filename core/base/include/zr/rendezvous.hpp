// zr::Rendezvous: the rank of a process, for a program that knows it from elsewhere than a launcher's variables.
#pragma once

#include <string>

namespace zr {

/// Which rank of which job a process is. zr::Program reads this from the variables of zeroth, torchrun, mpirun and srun
/// (docs/launching.md); a program that another system has started passes it. A value that any thread may read.
struct Rendezvous {
  int rank = 0;   // of this process, 0 to world - 1
  int world = 1;  // number of ranks of the job, at most 4096
  /// "host:port" (IPv6: "[fd00::1]:29600"): where rank 0 listens, and the other ranks find it; the same on all ranks.
  /// Not needed by a job of one rank.
  std::string address = {};
  /// A secret that all ranks have, and other processes do not. Empty: ranks on one host (127.0.0.1) share one by a
  /// file; on several hosts ZR_TOKEN, or else a token derived from the address, with a warning.
  std::string token = {};
};

}  // namespace zr
