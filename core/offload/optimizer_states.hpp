// Master weights and optimizer states of the parameters that a rank updates, each range on its tier: access to them,
// and the pass that updates them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/device_memory.hpp"
#include "offload/tier.hpp"
#include "offload/tier_resources.hpp"
#include "plan/plan.hpp"
#include "update/update.hpp"

namespace zr::host::offload {

/// Seconds that the training thread waited for a tier.
struct TierWaits {
  double read = 0, write = 0;
};

/// Training thread only.
class OptimizerStates {
 public:
  /// Reserves the plan's memory and disk allocations; all states are zero. Keeps references to all arguments. `device`:
  /// has the states of the plan's device tier; null: they are in host memory.
  OptimizerStates(const plan::MemoryPlan& plan, Tiers& tiers, Ledger& ledger, DeviceMemory* device = nullptr);
  OptimizerStates(const OptimizerStates&) = delete;

  /// The ranges of elements [first, first + count) of the state space, each on one tier.
  std::vector<plan::StateRange> ranges(int64_t first, int64_t count) const;
  bool in_memory(int tier) const { return plan_.input.tiers[static_cast<std::size_t>(tier)].in_memory(); }
  /// The elements of an array (RankPlan::state_arrays) for a range of the state space within one piece, whose states
  /// are on one tier. No data if that is a disk.
  zr_view view(std::size_t array, int64_t first, int64_t count) const;

  enum class Access { read, write, modify };
  /// Calls fn(memory, first, count) over the elements of an array for a range of the state space within one piece, on
  /// any tier, in one or several calls: `memory` has the elements of the array for elements [first, first + count) of
  /// the state space. `what` names them in errors.
  void visit(std::size_t array, int64_t first, int64_t count, Access access, const std::string& what,
             const std::function<void(void* memory, int64_t first, int64_t count)>& fn);

  /// Starts to read the first tiles of a pass and returns. `slices`: all of this rank; must be valid until the pass.
  void read_ahead(const std::vector<update::UpdateSlice>& slices);
  /// One pass over all states on disk: reads each tile, calls `work` with its slices, whose states are then in memory,
  /// and writes the tile. Skips tiles without touched parameters, and those that are not 0 in `skipped` (by tile;
  /// empty: none). Returns before the last tiles are written.
  void for_each_slice_in_memory(const std::vector<update::UpdateSlice>& slices, const std::vector<char>& touched,
                                const std::vector<char>& skipped,
                                const std::function<void(const std::vector<update::UpdateSlice>& slices)>& work);

  const TierWaits& waits() const { return waits_; }
  /// Counts waits of the training thread for transfers that another thread waits for.
  void add_waits(const TierWaits& waits) {
    waits_.read += waits.read;
    waits_.write += waits.write;
  }
  /// Called after each wait for a tier, for traces, with its name and begin.
  using WaitObserver = std::function<void(const char* what, std::chrono::steady_clock::time_point begin)>;
  void on_wait(WaitObserver observer) { on_wait_ = std::move(observer); }

 private:
  friend class EarlyTiles;
  struct RangeMemory {
    plan::StateRange range;
    std::vector<void*> addresses;             // by array; empty on disk
    std::vector<TrackedMemory> owned;         // by array; on the device
    std::vector<TierAllocation> allocations;  // by array; on a tier in memory
  };
  struct SlicePart {  // the part of a slice in a tile
    const update::UpdateSlice* slice;
    int64_t first, count;  // elements of the state space
  };
  struct TilePass {  // a tile of the current pass over all tiles
    std::size_t tile;
    std::vector<SlicePart> parts;
    std::string what;
    Transfer read;
  };
  MemoryKind kind_of(std::size_t array) const;
  void allocate_memory(RangeMemory& memory, Ledger& ledger);
  TierAllocation reserve_tiles(std::size_t tier);
  void allocate_staging(Ledger& ledger);
  const RangeMemory& memory_of(int64_t element) const;
  int64_t offset_in_tile(const plan::StateTile& tile, std::size_t array) const;
  int64_t bytes_in_tile(const plan::StateTile& tile, std::size_t array) const;
  zr_view view_in_tile(std::size_t index, const plan::StateTile& tile, std::size_t array, int64_t first,
                       int64_t count) const;
  // The tiles with touched parameters that are not skipped (empty: none is).
  std::vector<TilePass> passes_of(const std::vector<update::UpdateSlice>& slices, const std::vector<char>* touched,
                                  const std::vector<char>& skipped) const;
  void start_read(std::size_t index);
  // Starts to read a tile to `buffer`, in which a state that was never written is zero.
  Transfer read_tile(std::size_t index, char* buffer, const std::string& what);
  // Starts to write a tile from staging buffer `index`.
  void write_tile(const TilePass& pass, std::size_t index);
  uint64_t allocation_of(const plan::StateTile& tile) const {
    return allocations_[static_cast<std::size_t>(tile.tier)].id();
  }
  std::vector<update::UpdateSlice> slices_in(const TilePass& pass, std::size_t index) const;
  void wait(Transfer& transfer, double& seconds, const char* what);
  void visit_on_device(const zr_view& states, const plan::StateRange& range, Access access,
                       const std::function<void(void*, int64_t, int64_t)>& fn);
  void visit_tile(std::size_t tile, std::size_t array, int64_t first, int64_t count, Access access,
                  const std::string& what, const std::function<void(void*, int64_t, int64_t)>& fn);
  char* tile_buffer(std::size_t index) const {
    return staging_.data() + static_cast<int64_t>(index % writes_.size()) * plan_.placement.largest_tile;
  }
  std::string name_of(const std::vector<SlicePart>& parts) const;
  const TierStore& store_of(const plan::StateTile& tile) const { return *tiers_[static_cast<std::size_t>(tile.tier)]; }
  TierStore& store_of(const plan::StateTile& tile) { return *tiers_[static_cast<std::size_t>(tile.tier)]; }

  const plan::MemoryPlan& plan_;
  Tiers& tiers_;
  DeviceMemory* const device_;
  const std::vector<plan::StateArray>& arrays_;
  std::vector<RangeMemory> ranges_;
  std::vector<std::vector<char>> written_;   // by tile, array; zeros until it is written
  std::vector<TierAllocation> allocations_;  // by tier; on disk
  TrackedMemory staging_;                    // kTilesInFlight tiles, in huge pages
  RegisteredMemory registered_;              // of staging_
  std::vector<Transfer> writes_;             // by staging buffer; destroyed before the above, waits
  std::vector<TilePass> tile_passes_;        // with their reads
  std::size_t started_ = 0;                  // number of these whose reads have started
  TierWaits waits_;
  WaitObserver on_wait_;
};

}  // namespace zr::host::offload
