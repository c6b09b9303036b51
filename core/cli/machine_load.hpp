// What other processes did during a measurement.
#pragma once

#include <cstdint>
#include <string>

namespace zr::host::cli {

/// Counters of the machine, of one disk, and of this process. -1: not known.
struct MachineLoad {
  double seconds = 0;                            // of a monotonic clock
  double busy_seconds = -1, own_seconds = -1;    // CPU time of the machine, and of this process
  int64_t disk_bytes = -1, own_disk_bytes = -1;  // read and written
  /// Reads them. `device`: the disk's, as stat() gives it. `root` replaces / in tests.
  static MachineLoad now(uint64_t device, const std::string& root = "");
};

/// "other processes used 1.7 of 2 cores", "other processes moved 3.20 GiB on this disk (this one 1.00 GiB)", or both,
/// if that may have slowed the measurement: more than a quarter of the cores, or of the bytes. "" otherwise.
std::string disturbance_text(const MachineLoad& begin, const MachineLoad& end, int cores);

}  // namespace zr::host::cli
