// Limits of the control groups (v1 and v2) that this process belongs to: containers limit cores, memory and processes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zr::host {

/// A folder of a control group in /sys/fs/cgroup.
struct ControlGroup {
  std::string folder;  // without the prefix `root`
  bool v2 = false;
};
/// What a control group limits.
enum class Controller { cores, memory, processes };
/// The groups that limit this process: its own, then their parents. `root` replaces / in tests.
std::vector<ControlGroup> control_groups(const std::string& root, Controller controller);

/// The number at the start of a file; -1 if the file does not exist or contains "max".
int64_t number_in(const std::string& path);
/// The number after a word at the start of a line of a file, such as "MemTotal:"; `missing` if there is no such line.
int64_t number_after(const std::string& path, const std::string& word, int64_t missing);

}  // namespace zr::host
