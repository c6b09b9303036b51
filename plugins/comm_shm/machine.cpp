#include "machine.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace shm {

namespace {
std::string namespace_number(const char* file, const char* otherwise) {
  struct stat info {};
  return ::stat(file, &info) == 0 ? std::to_string(info.st_ino) : otherwise;
}
}  // namespace

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0 || !name[0]) return "unknown";
  return name;
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id.empty() ? "unknown" : id;
}

std::string pid_namespace() { return namespace_number("/proc/self/ns/pid", "unknown"); }
std::string network_namespace() { return namespace_number("/proc/self/ns/net", ""); }

}  // namespace shm
