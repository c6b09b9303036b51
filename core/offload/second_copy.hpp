// Memory that an update of states on tiers needs so that it can be undone.
#pragma once

#include <cstdint>

#include "base/ledger.hpp"
#include "offload/tier_resources.hpp"
#include "plan/plan.hpp"
#include "update/update.hpp"

namespace zr::host::offload {

/// Contains the new weights of slices with states on tiers, and copies of states on tiers in memory, as the plan says
/// (MemoryPlan::second_copy). States on disk have their second copy in OptimizerStates. Training thread only.
class SecondCopy {
 public:
  /// Allocates the planned memory, if there is any. The plan outlives the object.
  SecondCopy(const plan::MemoryPlan& plan, Ledger& ledger);
  /// Sets where a slice stores its new weights, and, if its states are in memory, their copies. Does nothing if the
  /// plan has no second copy or the slice's states are on the device. Call it once per slice.
  void place(update::UpdateSlice& slice);

 private:
  struct CopyMemory {
    TrackedMemory memory;
    int64_t used = 0;  // bytes
    zr_view take(int64_t count, zr_dtype dtype);
  };
  const plan::MemoryPlan& plan_;
  CopyMemory weights_, states_;
};

}  // namespace zr::host::offload
