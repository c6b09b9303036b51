// Where each part of the training state stands: on the device, or on a tier behind it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ledger.hpp"

namespace zr::host {

/// Something that can hold a part of the training state; of a plan, 0 is the device.
struct TierFacts {
  std::string id = "device";
  Tier tier = Tier::device;
  bool in_memory() const { return tier != Tier::disk; }  // worked on where it stands
  int64_t io_bytes = 0, io_depth = 1, align = 64;        // of transfers, where it is not
  int64_t kept_per_mib = 0;                              // host memory of its own that it takes for what it stores
};

/// A place that the plan is to find: the first with room.
inline constexpr int kAnyPlace = -1;

/// What the configuration asks for, as indices of places.
struct Wanted {
  int states = 0, sums = 0, shards = 0, activations = 0;
  double fraction = 0;      // of the states that stays on the device
  int64_t device_room = 0;  // of a rank; 0: no limit. For kAnyPlace only, as host_room
  int64_t host_room = 0;    // of a rank
  bool snapshot = false;    // of host_room, a copy for checkpoints is taken
  bool activations_known = false;
  int64_t activations_here = 0;   // measured, of a rank on the device, temporaries too
  int64_t activations_aside = 0;  // then, on tiers
  bool elementwise = true;        // the optimizer lets a run of states be cut anywhere
};

/// Elements [first, first + count) of the state space (RankPlan::state_offset) on one place.
struct StateRun {
  int place;
  int64_t first, count;
};

/// A part of a run on disk that is read, updated and written at a time; arrays one after another, each at a multiple of
/// the place's alignment.
struct StateTile {
  int place;
  int64_t first, count;  // elements
  int64_t at, bytes;     // in the place's slot
};

/// What stands on a place, and why.
struct PlacedPart {
  std::string part;
  int place;
  std::string why;
};

struct Placement {
  std::vector<StateRun> states;  // ascending, all of the state space
  std::vector<StateTile> tiles;  // of the runs on disk, ascending
  int sums = 0, shards = 0, activations = 0;
  int64_t largest_tile = 0;       // bytes
  std::vector<PlacedPart> parts;  // for people
};

}  // namespace zr::host
