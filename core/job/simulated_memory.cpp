#include "job/simulated_memory.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"

namespace zr::host::job {

namespace {
void* map(void* at, std::size_t bytes, int protection, int flags, int file) {
  void* const begin = ::mmap(at, bytes, protection, flags, file, 0);
  if (begin == MAP_FAILED)
    fail_environment(
        fmt::format("the addresses of a planned buffer cannot be reserved ({}); raise the limit of "
                    "virtual memory (ulimit -v), or plan without --hosts",
                    std::strerror(errno)));
  return begin;
}
}  // namespace

SimulatedMemory::SimulatedMemory(std::size_t window_bytes)
    : window_bytes_(window_bytes), memory_("planned buffers", ::memfd_create("zeroth-plan", MFD_CLOEXEC)) {
  memory_.resize(static_cast<int64_t>(window_bytes_));
}

SimulatedMemory::~SimulatedMemory() {
  for (const auto& [begin, bytes] : mapped_) ::munmap(begin, bytes);
}

void* SimulatedMemory::add(int64_t bytes) {
  const auto size = static_cast<std::size_t>(std::max<int64_t>(bytes, 1));
  void* const begin = map(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  mapped_.emplace_back(begin, size);
  for (std::size_t at = 0; at < size; at += window_bytes_)
    map(static_cast<char*>(begin) + at, std::min(window_bytes_, size - at), PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_FIXED, memory_.descriptor());
  return begin;
}

}  // namespace zr::host::job
