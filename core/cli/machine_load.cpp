#include "cli/machine_load.hpp"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>

#include "base/cgroup.hpp"
#include "base/text.hpp"

namespace zr::host::cli {

namespace {

// The CPU time of all processes: the first line of /proc/stat without idle and iowait, in ticks.
double read_busy_seconds(const std::string& root) {
  std::ifstream in(root + "/proc/stat");
  std::string word;
  if (!(in >> word)) return -1;
  double busy = 0, ticks = 0;
  for (int field = 0; field < 8 && in >> ticks; ++field)  // user nice system idle iowait irq softirq steal
    if (field != 3 && field != 4) busy += ticks;
  return busy / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

double read_own_seconds() {
  rusage used{};
  if (::getrusage(RUSAGE_SELF, &used) != 0) return -1;
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// The line of a block device; -1 for a file system without one, such as overlayfs.
int64_t read_disk_bytes(const std::string& root, uint64_t device) {
  std::ifstream in(root + "/proc/diskstats");
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    unsigned major = 0, minor = 0;
    std::string name;
    int64_t reads = 0, merged = 0, read_sectors = 0, time = 0, writes = 0, written_sectors = 0;
    if (fields >> major >> minor >> name >> reads >> merged >> read_sectors >> time >> writes >> merged >>
            written_sectors &&
        major == gnu_dev_major(device) && minor == gnu_dev_minor(device))
      return (read_sectors + written_sectors) * 512;
  }
  return -1;
}

int64_t read_own_disk_bytes(const std::string& root) {
  const std::string file = root + "/proc/self/io";
  const int64_t read = number_after(file, "read_bytes:", -1), written = number_after(file, "write_bytes:", -1);
  return read < 0 || written < 0 ? -1 : read + written;
}

}  // namespace

MachineLoad MachineLoad::now(uint64_t device, const std::string& root) {
  const auto clock = std::chrono::steady_clock::now().time_since_epoch();
  return {std::chrono::duration<double>(clock).count(), read_busy_seconds(root), read_own_seconds(),
          read_disk_bytes(root, device), read_own_disk_bytes(root)};
}

std::string disturbance_text(const MachineLoad& begin, const MachineLoad& end, int cores) {
  constexpr double kShare = 0.25;
  std::string text;
  const double elapsed = end.seconds - begin.seconds;
  if (begin.busy_seconds >= 0 && begin.own_seconds >= 0 && elapsed > 0) {
    const double others = ((end.busy_seconds - begin.busy_seconds) - (end.own_seconds - begin.own_seconds)) / elapsed;
    if (others > kShare * cores)
      text = fmt::format("other processes used {:.1f} of {} core{}", others, cores, cores == 1 ? "" : "s");
  }
  if (begin.disk_bytes >= 0 && begin.own_disk_bytes >= 0) {
    const int64_t own = end.own_disk_bytes - begin.own_disk_bytes;
    const int64_t others = end.disk_bytes - begin.disk_bytes - own;
    if (static_cast<double>(others) > kShare * static_cast<double>(others + own))
      text += fmt::format("{} moved {} on this disk (this one {})", text.empty() ? "other processes" : " and",
                          bytes_text(others), bytes_text(own));
  }
  return text;
}

}  // namespace zr::host::cli
