#include "device_memory.hpp"

#include <algorithm>

namespace peer {

DeviceMemory::~DeviceMemory() {
  close_peers();
  for (const auto& [memory, allocation] : own_) device_.free(memory);
}

void* DeviceMemory::allocate(uint64_t bytes) {
  bytes = std::max<uint64_t>(bytes, 1);
  Allocation allocation{++allocations_, bytes, {}, false};
  void* const memory = device_.allocate(bytes, &allocation.handle);
  own_.emplace(static_cast<char*>(memory), allocation);
  return memory;
}

void DeviceMemory::release(void* memory) noexcept {
  const auto at = own_.find(static_cast<char*>(memory));
  if (at != own_.end()) at->second.is_free = true;
}

Location DeviceMemory::location_of(const void* data, int64_t bytes) const {
  const auto* const begin = static_cast<const char*>(data);
  auto at = own_.upper_bound(const_cast<char*>(begin));
  if (at == own_.begin()) return {};
  --at;
  const Allocation& allocation = at->second;
  const int64_t offset = begin - at->first;
  if (allocation.is_free || offset + bytes > static_cast<int64_t>(allocation.bytes)) return {};
  return {allocation.number, offset, allocation.handle};
}

char* DeviceMemory::at(int rank, const Location& location) {
  void*& opened = opened_[static_cast<size_t>(rank)][location.allocation];
  if (!opened) opened = device_.open(location.memory);
  return static_cast<char*>(opened) + location.offset;
}

void DeviceMemory::close_peers() noexcept {
  for (auto& by_number : opened_) {
    for (const auto& [number, memory] : by_number)
      if (memory) device_.close(memory);
    by_number.clear();
  }
}

void DeviceMemory::abandon() noexcept {
  own_.clear();
  for (auto& by_number : opened_) by_number.clear();
}

}  // namespace peer
