// Master weights and optimizer states of what a rank updates, each run of them on its tier: reached, and updated in
// one pass.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/thread_pool.hpp"
#include "offload/tier.hpp"
#include "offload/tier_resources.hpp"
#include "plan/plan.hpp"
#include "update/update.hpp"

namespace zr::host {

/// Seconds that the training thread stood still for a tier.
struct TierWaits {
  double read = 0, write = 0;
};

/// Training thread only.
class OptimizerStates {
 public:
  /// Takes the plan's memory and disk, zeroed. Refers to all of them.
  OptimizerStates(const MemoryPlan& plan, Tiers& tiers, Ledger& ledger);
  OptimizerStates(const OptimizerStates&) = delete;

  /// The runs of a piece of sums, each on one tier: elements of the state space.
  std::vector<StateRun> runs(int64_t first, int64_t count) const;
  bool in_memory(int tier) const { return plan_.input.tiers[static_cast<std::size_t>(tier)].in_memory(); }
  /// Elements of an array (MemoryPlan::state_arrays) within a run that is in memory.
  zr_view view(std::size_t array, int64_t first, int64_t count) const;

  enum class Access { read, write, modify };
  /// Calls fn(memory, first, count) over elements [first, first + count) of an array, wherever they stand. `what` names
  /// them in errors.
  void visit(std::size_t array, int64_t first, int64_t count, Access use, const std::string& what,
             const std::function<void(void* memory, int64_t first, int64_t count)>& fn);

  /// Reads what a pass begins with, while the caller does something else. `slices`: all of this rank, until the pass.
  void read_ahead(const std::vector<UpdateSlice>& slices);
  /// One pass over all states on disk: each tile is read, handed to `work` as slices whose states are in memory, and
  /// written. Tiles of parameters that were not touched are passed over. Returns before the last are written.
  void pass(const std::vector<UpdateSlice>& slices, const std::vector<char>& touched,
            const std::function<void(const std::vector<UpdateSlice>& slices)>& work);

  const TierWaits& waits() const { return waits_; }
  /// Of a tier's work for this pass, for traces: name, begin, end.
  using WaitObserver = std::function<void(const char* what, std::chrono::steady_clock::time_point begin)>;
  void on_wait(WaitObserver observer) { on_wait_ = std::move(observer); }

 private:
  struct Run {
    StateRun at;
    std::vector<void*> memory;                // by array, in memory
    std::vector<TrackedMemory> owned;         // likewise, on the device
    std::vector<TierAllocation> allocations;  // likewise, of a tier
  };
  struct Part {  // of a tile
    const UpdateSlice* slice;
    int64_t first, count;  // of the state space
  };
  struct Step {  // a tile of the pass under way
    std::size_t tile;
    std::vector<Part> parts;
    std::string what;
    Transfer read;
  };
  const Run& run_of(int64_t element) const;
  int64_t offset_in_tile(const StateTile& tile, std::size_t array) const;
  std::vector<Step> steps_of(const std::vector<UpdateSlice>& slices, const std::vector<char>* touched) const;
  void start_read(std::size_t index);
  std::vector<UpdateSlice> slices_in(const Step& step, std::size_t index) const;
  void wait(Transfer& transfer, double& seconds, const char* what);
  void visit_tile(std::size_t tile, std::size_t array, int64_t first, int64_t count, Access use,
                  const std::string& what, const std::function<void(void*, int64_t, int64_t)>& fn);
  char* tile_buffer(std::size_t index) const {
    return staging_.data() + static_cast<int64_t>(index % writes_.size()) * plan_.placement.largest_tile;
  }
  std::string name_of(const std::vector<Part>& parts) const;
  uint64_t allocation_of(const StateTile& tile) const { return allocations_[static_cast<std::size_t>(tile.tier)].id(); }
  const TierStore& store_of(const StateTile& tile) const { return *tiers_[static_cast<std::size_t>(tile.tier)]; }
  TierStore& store_of(const StateTile& tile) { return *tiers_[static_cast<std::size_t>(tile.tier)]; }

  const MemoryPlan& plan_;
  Tiers& tiers_;
  const std::vector<MemoryPlan::StateArray> arrays_;
  std::vector<Run> runs_;
  std::vector<std::vector<char>> written_;   // by tile, array: it has been; else zeros
  std::vector<TierAllocation> allocations_;  // by tier: on disk
  TrackedMemory staging_;                    // kTilesInFlight tiles
  RegisteredMemory registered_;              // of staging_
  std::vector<Transfer> writes_;             // what is being written from each; waited for before all above goes
  std::vector<Step> steps_;                  // and being read
  std::size_t started_ = 0;
  TierWaits waits_;
  WaitObserver on_wait_;
};

}  // namespace zr::host
