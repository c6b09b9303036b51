// Updates single tiles of optimizer states on disk, in the order in which their gradients become final.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

#include "offload/optimizer_states.hpp"
#include "update/update.hpp"

namespace zr::host::offload {

/// One thread at a time. Between the first call of a step and end(), it uses the staging memory of the states: nothing
/// else may use the states on disk.
class EarlyTiles {
 public:
  /// `slices`: all of this rank; both outlive the object.
  EarlyTiles(OptimizerStates& states, const std::vector<update::UpdateSlice>& slices);
  EarlyTiles(const EarlyTiles&) = delete;

  /// The parts of this rank's slices in a tile, without states.
  struct Tile {
    std::size_t index;  // in the plan's tiles
    std::vector<update::UpdateSlice> slices;
  };
  /// The tiles that contain slices, in the order of the state space.
  std::vector<Tile> tiles() const;
  /// Call before the other functions in a step: waits for all transfers of the step before, whose order with those of
  /// this step would be undefined.
  void begin();
  /// Starts to read a tile, unless it is being read or two staging buffers are not free. Returns true if it is being
  /// read.
  bool read_ahead(std::size_t tile);
  /// Waits until a tile is read, calls `work` with its slices, whose states are then in memory, and starts to write it.
  void update(std::size_t tile, const std::function<void(const std::vector<update::UpdateSlice>& slices)>& work);
  /// Ends a step: waits for what was read ahead, and drops it. Tiles may still be written.
  void end();
  /// Called after each wait for a write or read, with its begin.
  using WaitObserver = std::function<void(bool writes, std::chrono::steady_clock::time_point begin)>;
  void on_wait(WaitObserver observer) { on_wait_ = std::move(observer); }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  struct Buffer {
    std::size_t tile = kNone;  // being read; kNone: free, or being written
    Transfer read;
  };
  std::size_t free_buffer() const;  // one without a tile, if possible also without a write in progress; kNone: none
  void start_read(std::size_t buffer, std::size_t tile);
  void wait(Transfer& transfer, bool writes) const;
  const OptimizerStates::TilePass& pass_of(std::size_t tile) const { return passes_[pass_of_tile_[tile]]; }

  OptimizerStates& states_;
  std::vector<OptimizerStates::TilePass> passes_;  // all tiles that contain slices
  std::vector<std::size_t> pass_of_tile_;          // by tile: index in passes_
  std::vector<Buffer> buffers_;                    // by staging buffer
  WaitObserver on_wait_;
};

}  // namespace zr::host::offload
