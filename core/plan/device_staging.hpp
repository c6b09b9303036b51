// Host memory through which states in host memory or on disk are updated if gradients and weights are on a device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace zr::host::plan {

struct MemoryPlan;

/// Elements of a block at most, if its parameters may be cut: 32 MiB of gradients.
inline constexpr int64_t kDeviceBlock = int64_t{8} << 20;
/// Blocks whose weights are in host memory at a time: one is prepared, one is updated, one is copied to the device.
inline constexpr int64_t kMostDeviceSlots = 3;

struct DeviceStaging {
  /// A range of a buffer of the plan with fp32 reduced gradients whose states are on a tier. It begins and ends where
  /// its parameters may be cut.
  struct Block {
    uint32_t buffer;
    int64_t first, count;        // elements
    std::size_t allocation = 0;  // in `allocations`, if gradients are copied early
    int64_t offset = 0;          // elements in it
  };
  std::vector<Block> blocks;         // by buffer and element, ascending
  int64_t largest = 0;               // elements of the largest block
  bool copies_early = false;         // gradients are copied during backward, so each block has memory of its own
  std::vector<int64_t> allocations;  // bytes, powers of two, to which libtorch rounds pinned memory; for early copies
  /// All planned pinned memory, in bytes: gradients, and slots for the weights of a block, or for both.
  int64_t bytes() const;
  int64_t slots() const { return std::min(kMostDeviceSlots, std::ssize(blocks)); }
  /// Of one slot; the weights are at its begin.
  int64_t slot_bytes() const;
};

/// The staging of a plan whose tiers are assigned.
DeviceStaging plan_device_staging(const MemoryPlan& plan, bool copies_early);

}  // namespace zr::host::plan
