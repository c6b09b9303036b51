#include "memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "zr/round_up.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace cpu {

namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20, kHugeFrom = uint64_t{4} << 20, kGrain = uint64_t{64} << 20;

[[noreturn]] void reject(uint64_t bytes, const std::string& tag, const std::string& why, int error) {
  throw zr::PluginError(ZR_NOMEM,
                        "tier cpu: cannot allocate " + std::to_string(bytes) + " bytes for '" + tag + "': " + why +
                            "; offload less, run fewer ranks on this node, or offload to a disk",
                        error);
}

// The number at the start of a file; -1 if the file does not exist or contains "max".
int64_t number_in(const std::string& path) {
  std::ifstream in(path);
  int64_t value = -1;
  return in >> value ? value : -1;
}
// The number after a word at the start of a line; `missing` if there is no such line.
int64_t number_after(const std::string& path, const std::string& word, int64_t missing) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);)
    if (line.compare(0, word.size(), word) == 0) return std::strtoll(line.c_str() + word.size(), nullptr, 10);
  return missing;
}

// Applies the limit of one control group. Inactive page cache counts as free, because the kernel reclaims it first.
void apply_limit(AvailableMemory& memory, const std::string& folder, bool second) {
  const int64_t limit = number_in(folder + (second ? "/memory.max" : "/memory.limit_in_bytes"));
  const int64_t used = number_in(folder + (second ? "/memory.current" : "/memory.usage_in_bytes"));
  if (limit < 0 || used < 0) return;
  const int64_t cache = number_after(folder + "/memory.stat", second ? "inactive_file " : "total_inactive_file ", 0);
  const int64_t left = std::max<int64_t>(limit - used + std::min(cache, used), 0);
  if (memory.bytes < 0 || left < memory.bytes) memory = {left, "the limit of control group " + folder};
}

}  // namespace

AvailableMemory available_memory(const std::string& root) {
  AvailableMemory memory;
  const int64_t available = number_after(root + "/proc/meminfo", "MemAvailable:", -1);
  if (available >= 0) memory = {available * 1024, "MemAvailable of /proc/meminfo"};
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    std::istringstream in(line);
    std::string number, controllers, path;
    if (!std::getline(in, number, ':') || !std::getline(in, controllers, ':') || !std::getline(in, path)) continue;
    const bool second = controllers.empty();
    if (!second && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    const std::string top = root + "/sys/fs/cgroup" + (second ? "" : "/memory");
    for (;; path.resize(path.rfind('/'))) {  // parent groups limit it too
      if (path == "/") path.clear();
      apply_limit(memory, top + path, second);
      if (path.rfind('/') == std::string::npos) break;
    }
  }
  return memory;
}

Block::Block(const zr::Host& host, uint64_t bytes, const std::string& tag) : bytes_(bytes) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  if (bytes > uint64_t{1} << 46) reject(bytes, tag, "more than any machine has", ENOMEM);
  mapped_ = std::max(zr::round_up(bytes, page), page);
  const AvailableMemory memory = available_memory();
  if (memory.bytes >= 0 && mapped_ > static_cast<uint64_t>(memory.bytes))
    reject(mapped_, tag, std::to_string(memory.bytes) + " bytes are available (" + memory.source + ")", ENOMEM);
  // Map more than needed, begin at a huge-page boundary, and unmap the rest at both ends.
  const uint64_t extra = mapped_ >= kHugeFrom ? kHugePage - page : 0;
  void* mapping = ::mmap(nullptr, mapped_ + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) reject(mapped_, tag, std::strerror(errno), errno);
  char* start = static_cast<char*>(mapping);
  const uint64_t skip = extra ? (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage : 0;
  data_ = start + skip;
  if (skip) ::munmap(start, skip);
  if (extra > skip) ::munmap(data_ + mapped_, extra - skip);
  if (extra) ::madvise(data_, mapped_, MADV_HUGEPAGE);
  try {
    populate(host);
  } catch (const zr::PluginError& error) {
    ::munmap(data_, mapped_);
    reject(mapped_, tag, error.what(), static_cast<int>(error.native()));
  }
}

Block::~Block() { ::munmap(data_, mapped_); }

// Faults in all pages now, on the host's threads: a failure later, on first access, could not be reported.
void Block::populate(const zr::Host& host) const {
  const auto fill = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* from = data_ + static_cast<uint64_t>(i) * kGrain;
      const uint64_t bytes = std::min<uint64_t>(kGrain, mapped_ - static_cast<uint64_t>(i) * kGrain);
      int error = 0;
      do error = ::madvise(from, bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
      while (error == EINTR || error == EAGAIN);
      if (error == EINVAL) {
        std::memset(from, 0, bytes);  // before Linux 5.14
      } else if (error) {
        throw zr::PluginError(ZR_NOMEM, std::strerror(error), error);
      }
    }
  };
  const auto pieces = static_cast<int64_t>((mapped_ + kGrain - 1) / kGrain);
  if (pieces > 1 && host.find<zr_task_service>()) {
    zr::Tasks(host).parallel_for(pieces, 1, fill);
  } else {
    fill(0, pieces);
  }
}

}  // namespace cpu
