// What a job needs of the machine, as far as it is known without starting its program.
#pragma once

#include <cstdint>
#include <string>

namespace zr::host::doctor {

/// The needs of a job; without a file, those of the smallest job.
struct JobNeeds {
  std::string file{};              // the TOML file; "" if no file is given
  int ranks = 1;                   // all on this machine, as with `zeroth train`
  int threads = 0;                 // per rank; 0: the cores divided by the ranks
  int64_t communicator_bytes = 0;  // per rank, before the model
  int64_t registered_bytes = 0;    // per rank: memory that a disk tier registers with the kernel; 0: no disk tier
  bool has_disk_tier = false;
  std::string device{}, device_library{};  // job.device and job.device_library; "": the CPU, or not known
  /// True if a TOML file is given.
  bool given() const { return !file.empty(); }
};

}  // namespace zr::host::doctor
