// The cores that this process may use.
#pragma once

#include <string>

namespace zr::host {

struct UsableCores {
  int affinity = 1;     // by the CPU affinity of this process
  double quota = -1;    // of the control groups, in cores; -1: no limit
  std::string group{};  // the control group with that quota
  /// Whole cores, at least 1: what is divided among ranks if job.threads is 0.
  int whole() const;
  /// True if the quota is less than the affinity.
  bool limited() const { return quota > 0 && quota < affinity; }
};

/// Reads the affinity, and the quota of the control groups below `root`, which replaces / in tests.
UsableCores usable_cores(const std::string& root = "");
/// "the quota of control group G is 1.5 of 8 cores"; "" if the quota does not limit the cores.
std::string quota_text(const UsableCores& cores);

}  // namespace zr::host
