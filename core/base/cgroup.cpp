#include "base/cgroup.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace zr::host {

namespace {

// The kernel's name of the controller, between commas.
std::string name_of(Controller controller) {
  switch (controller) {
    case Controller::cores: return ",cpu,";
    case Controller::memory: return ",memory,";
    default: return ",pids,";
  }
}

bool names(const std::string& controllers, Controller controller) {
  return fmt::format(",{},", controllers).find(name_of(controller)) != std::string::npos;
}

// Where a hierarchy is mounted: v1 hierarchies by the names of their controllers, v2 alone or beside v1.
std::vector<std::string> mounts(const std::string& controllers, Controller controller) {
  const std::string name = name_of(controller), top = "/sys/fs/cgroup/";
  if (!controllers.empty()) return {top + controllers, top + name.substr(1, name.size() - 2)};
  return {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};
}

// Adds the folders of a group and of its parents, which limit it too, in one hierarchy.
void add_groups(std::vector<ControlGroup>& found, const std::string& root, const std::string& mount, std::string path,
                bool v2) {
  std::error_code error;
  for (;; path.resize(path.rfind('/'))) {
    if (path == "/") path.clear();
    if (std::filesystem::is_directory(root + mount + path, error)) found.push_back({mount + path, v2});
    if (path.rfind('/') == path.npos) return;
  }
}

}  // namespace

std::vector<ControlGroup> control_groups(const std::string& root, Controller controller) {
  std::vector<ControlGroup> found;
  std::ifstream groups(root + "/proc/self/cgroup");
  std::error_code error;
  for (std::string line; std::getline(groups, line);) {  // "4:cpu,cpuacct:/docker/0123", "0::/user.slice"
    std::istringstream in(line);
    std::string number, controllers, path;
    if (!std::getline(in, number, ':') || !std::getline(in, controllers, ':') || !std::getline(in, path)) continue;
    if (!controllers.empty() && !names(controllers, controller)) continue;
    for (const std::string& mount : mounts(controllers, controller)) {
      if (!std::filesystem::is_directory(root + mount, error)) continue;
      add_groups(found, root, mount, path, controllers.empty());
      break;
    }
  }
  return found;
}

int64_t number_in(const std::string& path) {
  std::ifstream in(path);
  int64_t value = -1;
  return in >> value ? value : -1;
}

int64_t number_after(const std::string& path, const std::string& word, int64_t missing) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(word)) return std::strtoll(line.c_str() + word.size(), nullptr, 10);
  return missing;
}

}  // namespace zr::host
