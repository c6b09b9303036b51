// Memory of this rank's device that peers can open, and memory of peers that this rank has opened.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "peer_device.hpp"

namespace peer {

/// An address in a rank's shared memory, valid in every process.
struct Location {
  uint64_t allocation = 0;  // 0: nowhere; numbers are not used again
  int64_t offset = 0;       // bytes
  Handle memory{};
};

class DeviceMemory {
 public:
  DeviceMemory(PeerDevice& device, int world) : device_(device), opened_(static_cast<size_t>(world)) {}
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;

  void* allocate(uint64_t bytes);
  /// Peers may have it open, so it is freed when this object is destroyed.
  void release(void* memory) noexcept;
  /// Nowhere, unless one allocation contains all of [data, data + bytes).
  Location location_of(const void* data, int64_t bytes) const;
  /// An address of a peer in this process.
  char* at(int rank, const Location& location);
  /// Closes all memory of peers.
  void close_peers() noexcept;
  /// Frees and closes nothing, now or later: a stream may use all of it without end.
  void abandon() noexcept;

 private:
  struct Allocation {
    uint64_t number, bytes;
    Handle handle;
    bool is_free;
  };
  PeerDevice& device_;
  uint64_t allocations_ = 0;
  std::map<char*, Allocation> own_;
  std::vector<std::map<uint64_t, void*>> opened_;  // by rank, by number of the allocation
};

}  // namespace peer
