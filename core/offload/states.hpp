// Master weights and optimizer states of what a rank updates, each run of them on its place: reached, and updated in
// one pass.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/pool.hpp"
#include "offload/owned.hpp"
#include "offload/tier.hpp"
#include "plan/plan.hpp"
#include "update/update.hpp"

namespace zr::host {

/// Seconds that the training thread stood still for a tier.
struct TierWaits {
  double read = 0, write = 0;
};

/// Training thread only.
class States {
 public:
  /// Takes the plan's memory and disk, zeroed. Refers to all of them.
  States(const Plan& plan, Tiers& tiers, Ledger& ledger);
  States(const States&) = delete;

  /// The runs of a piece of sums, each on one place: elements of the state space.
  std::vector<StateRun> runs(int64_t first, int64_t count) const;
  bool in_memory(int place) const { return plan_.input.places[static_cast<std::size_t>(place)].in_memory(); }
  /// Elements of an array (Plan::state_arrays) within a run that is in memory.
  zr_view view(std::size_t array, int64_t first, int64_t count) const;

  enum class Use { read, write, change };
  /// Calls fn(memory, first, count) over elements [first, first + count) of an array, wherever they stand. `what` names
  /// them in errors.
  void visit(std::size_t array, int64_t first, int64_t count, Use use, const std::string& what,
             const std::function<void(void* memory, int64_t first, int64_t count)>& fn);

  /// Reads what a pass begins with, while the caller does something else. `units`: all of this rank, until the pass.
  void read_ahead(const std::vector<Unit>& units);
  /// One pass over all states on disk: each tile is read, handed to `work` as units whose states are in memory, and
  /// written. Tiles of parameters that were not touched are passed over. Returns before the last are written.
  void pass(const std::vector<Unit>& units, const std::vector<char>& touched,
            const std::function<void(const std::vector<Unit>& units)>& work);

  const TierWaits& waits() const { return waits_; }
  /// Of a tier's work for this pass, for traces: name, begin, end.
  using Told = std::function<void(const char* what, std::chrono::steady_clock::time_point begin)>;
  void on_wait(Told told) { told_ = std::move(told); }

 private:
  struct Run {
    StateRun at;
    std::vector<void*> memory;         // by array, in memory
    std::vector<CountedMemory> owned;  // likewise, on the device
    std::vector<OwnedSlot> slots;      // likewise, of a tier
  };
  struct Part {  // of a tile
    const Unit* unit;
    int64_t first, count;  // of the state space
  };
  struct Step {  // a tile of the pass under way
    std::size_t tile;
    std::vector<Part> parts;
    std::string what;
    Transfer read;
  };
  const Run& run_of(int64_t element) const;
  int64_t place_in_tile(const StateTile& tile, std::size_t array) const;
  std::vector<Step> steps_of(const std::vector<Unit>& units, const std::vector<char>* touched) const;
  void start_read(std::size_t index);
  std::vector<Unit> units_in(const Step& step, std::size_t index) const;
  void wait(Transfer& transfer, double& seconds, const char* what);
  void visit_tile(std::size_t tile, std::size_t array, int64_t first, int64_t count, Use use, const std::string& what,
                  const std::function<void(void*, int64_t, int64_t)>& fn);
  char* room(std::size_t index) const {
    return room_.data() + static_cast<int64_t>(index % rooms_.size()) * plan_.placement.largest_tile;
  }
  std::string name_of(const std::vector<Part>& parts) const;
  uint64_t slot_of(const StateTile& tile) const { return slots_[static_cast<std::size_t>(tile.place)].id(); }
  const TierStore& store_of(const StateTile& tile) const { return *tiers_[static_cast<std::size_t>(tile.place)]; }
  TierStore& store_of(const StateTile& tile) { return *tiers_[static_cast<std::size_t>(tile.place)]; }

  const Plan& plan_;
  Tiers& tiers_;
  const std::vector<Plan::StateArray> arrays_;
  std::vector<Run> runs_;
  std::vector<std::vector<char>> written_;  // by tile, array: it has been; else zeros
  std::vector<OwnedSlot> slots_;            // by place: on disk
  CountedMemory room_;                      // kTilesUnderWay tiles
  Announced announced_;                     // of room_
  std::vector<Transfer> rooms_;             // what is being written from each; waited for before all above goes
  std::vector<Step> steps_;                 // and being read
  std::size_t started_ = 0;
  TierWaits waits_;
  Told told_;
};

}  // namespace zr::host
