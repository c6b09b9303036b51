// The tier on which each part of the training state is stored: the device, host memory or a disk.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ledger.hpp"

namespace zr::host::plan {

/// A tier that can store a part of the training state. Index 0 of a plan's tiers is the device.
struct TierInfo {
  std::string id = "device";
  Tier tier = Tier::device;
  bool in_memory() const { return tier != Tier::disk; }  // the optimizer can update data on it in place
  int64_t io_bytes = 0, io_depth = 1, align = 64;  // of transfers, if not in memory: bytes, requests in flight, bytes
  int64_t host_bytes_per_mib = 0;                  // host memory overhead of stored data, bytes per MiB
};

/// `auto`: the plan chooses the first tier with enough capacity.
inline constexpr int kAnyTier = -1;

/// The tiers that the configuration requests, as indices.
struct TierRequest {
  int states = 0, reduced_gradients = 0, shards = 0, activations = 0;
  double device_fraction = 0;   // fraction of the states that stays on the device
  int64_t device_capacity = 0;  // bytes per rank; 0: no limit; used for kAnyTier only
  int64_t host_capacity = 0;    // bytes per rank; 0: no limit; used for kAnyTier only
  /// All state of a job on a device is in host memory, also that of tier 0. device_capacity is then the capacity of the
  /// device for copies of unsharded weights, and for activations.
  bool state_in_host_memory = false;
  bool snapshot = false;  // a copy for checkpoints is part of host_capacity
  bool activations_known = false;
  int64_t activations_on_device = 0;  // measured bytes per rank, temporaries included
  int64_t activations_offloaded = 0;  // measured bytes per rank on tiers, in the same run
  bool copies_gradients = false;      // DeviceStaging::bytes() with early copies is a part of host_capacity
};

/// Elements [first, first + count) of the state space (RankPlan::state_offset) on one tier.
struct StateRange {
  int tier;
  int64_t first, count;
};

/// A part of a range on disk that is read, updated and written as one. It has as many elements as io_bytes x io_depth
/// of the tier hold of all arrays, at least one norm block, and full parameters if the optimizer requires them. Its
/// arrays follow each other, each at a multiple of the tier's alignment.
struct StateTile {
  int tier;
  int64_t first, count;   // elements
  int64_t offset, bytes;  // bytes, in the tier's allocation
};

/// The tier of one part of the training state, and the reason.
struct TierAssignment {
  std::string part;
  int tier;
  std::string why;
};

struct Placement {
  std::vector<StateRange> states;  // ascending; they cover the state space
  std::vector<StateTile> tiles;    // of the ranges on disk; ascending
  int reduced_gradients = 0, shards = 0, activations = 0;
  int64_t largest_tile = 0;           // bytes
  std::vector<TierAssignment> parts;  // for placement_text()
};

}  // namespace zr::host::plan
