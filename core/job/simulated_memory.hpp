// Memory for plans: addresses that plug-ins may write to, without memory for what they write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/file.hpp"

namespace zr::host::job {

/// Every window of the addresses shows the same memory, which has pages only where it is written: a plug-in may write
/// everywhere, but what it writes is lost. One thread.
class SimulatedMemory {
 public:
  /// window_bytes: a multiple of the page size; at most so much memory is used. Smaller windows take more mappings, of
  /// which a process has 65530.
  explicit SimulatedMemory(std::size_t window_bytes);
  SimulatedMemory(const SimulatedMemory&) = delete;
  ~SimulatedMemory();
  /// Addresses for so many bytes, valid as long as this object. Throws EnvironmentError if there are none.
  void* add(int64_t bytes);

 private:
  const std::size_t window_bytes_;
  File memory_;
  std::vector<std::pair<void*, std::size_t>> mapped_;
};

}  // namespace zr::host::job
