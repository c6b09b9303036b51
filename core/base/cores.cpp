#include "base/cores.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "base/cgroup.hpp"
#include "base/text.hpp"

namespace zr::host {

namespace {

// The quota of one control group in cores; -1 if it has none.
double quota_of(const std::string& root, const ControlGroup& group) {
  const std::string folder = root + group.folder;
  double quota = -1, period = 0;
  if (group.v2) {
    std::ifstream in(folder + "/cpu.max");  // "50000 100000", "max 100000"
    if (!(in >> quota >> period)) return -1;
  } else {
    quota = static_cast<double>(number_in(folder + "/cpu.cfs_quota_us"));
    period = static_cast<double>(number_in(folder + "/cpu.cfs_period_us"));
  }
  return quota > 0 && period > 0 ? quota / period : -1;
}

}  // namespace

int UsableCores::whole() const { return std::max(1, limited() ? static_cast<int>(std::floor(quota)) : affinity); }

UsableCores usable_cores(const std::string& root) {
  UsableCores cores;
  cpu_set_t set;
  cores.affinity = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  for (const ControlGroup& group : control_groups(root, Controller::cores))
    if (const double quota = quota_of(root, group); quota > 0 && (cores.quota < 0 || quota < cores.quota)) {
      cores.quota = quota;
      cores.group = group.folder;
    }
  return cores;
}

std::string quota_text(const UsableCores& cores) {
  if (!cores.limited()) return "";
  return fmt::format("the quota of control group {} is {} of {} cores", cores.group, shortest(cores.quota),
                     cores.affinity);
}

}  // namespace zr::host
