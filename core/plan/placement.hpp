// Where each part of the training state stands: on the device, or on a tier behind it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ledger.hpp"

namespace zr::host {

/// Something that can hold a part of the training state; of a plan, 0 is the device.
struct TierInfo {
  std::string id = "device";
  Tier tier = Tier::device;
  bool in_memory() const { return tier != Tier::disk; }  // worked on where it stands
  int64_t io_bytes = 0, io_depth = 1, align = 64;        // of transfers, where it is not
  int64_t host_bytes_per_mib = 0;                        // host memory of its own that it takes for what it stores
};

/// A tier that the plan is to find: the first with room.
inline constexpr int kAnyTier = -1;

/// What the configuration asks for, as indices of tiers.
struct TierRequest {
  int states = 0, reduced_gradients = 0, shards = 0, activations = 0;
  double device_fraction = 0;   // of the states that stays on the device
  int64_t device_capacity = 0;  // of a rank; 0: no limit. For kAnyTier only, as host_capacity
  int64_t host_capacity = 0;    // of a rank
  bool snapshot = false;        // of host_capacity, a copy for checkpoints is taken
  bool activations_known = false;
  int64_t activations_on_device = 0;  // measured, of a rank on the device, temporaries too
  int64_t activations_offloaded = 0;  // then, on tiers
  bool elementwise = true;            // the optimizer lets a run of states be cut anywhere
};

/// Elements [first, first + count) of the state space (RankPlan::state_offset) on one tier.
struct StateRun {
  int tier;
  int64_t first, count;
};

/// A part of a run on disk that is read, updated and written at a time; arrays one after another, each at a multiple of
/// the tier's alignment.
struct StateTile {
  int tier;
  int64_t first, count;  // elements
  int64_t at, bytes;     // in the tier's slot
};

/// What stands on a tier, and why.
struct TierAssignment {
  std::string part;
  int tier;
  std::string why;
};

struct Placement {
  std::vector<StateRun> states;  // ascending, all of the state space
  std::vector<StateTile> tiles;  // of the runs on disk, ascending
  int reduced_gradients = 0, shards = 0, activations = 0;
  int64_t largest_tile = 0;           // bytes
  std::vector<TierAssignment> parts;  // for people
};

}  // namespace zr::host
