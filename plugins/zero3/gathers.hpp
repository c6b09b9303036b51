// Which sharded cells are whole on this rank: gathered on demand and ahead, kept while they are soon used again.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cells.hpp"
#include "trace.hpp"
#include "window.hpp"
#include "zr/strategy.hpp"

namespace zero3 {

/// Bytes.
struct Limits {
  int64_t prefetch;  // gathered ahead of use
  int64_t live;      // gathered at any time, but for what one operator uses at once
  int64_t reuse;     // distance to the next use up to which a cell stays
};

/// Elements of the window that `limits` call for.
int64_t window_elements(const Cells& cells, const Limits& limits, int64_t bytes_per_element);

/// Every decision follows from the order of uses alone, so that all ranks issue the same gathers. [use]
class Gathers {
 public:
  /// cells outlives it. shard, window: the plan's buffers.
  Gathers(const zr_plan_in& in, const Cells& cells, const Limits& limits, const zr::Comm& comm, const zr_view& shard,
          const zr_view& window, const zr::Host& host);
  ~Gathers();

  /// whole[i]: the parameter in the window. Uses in ZR_FORWARD and ZR_BACKWARD are recorded.
  void acquire(const uint32_t* params, uint32_t n, uint32_t phase, zr_view* whole);
  void release(const uint32_t* params, uint32_t n);
  /// A training pass, forward and backward, is over: nothing is on its way afterwards.
  void pass_end();
  void wait();      // for what is on its way
  void refresh();   // the shards are new: nothing gathered is valid any more
  void prefetch();  // starts what the recorded order uses next

 private:
  enum class State : uint8_t { absent, coming, whole };
  struct Live {
    State state = State::absent;
    int users = 0;       // parameters acquired and not yet released
    bool ahead = false;  // gathered before its use, and not yet used
    int64_t place = -1;  // in the window; -1: in `apart`
    zr_view apart{};     // the host's memory, where the window had no room
    bool stays = false;  // `apart`, for the next that finds none
    zr::Done done;
  };
  zr_view memory(uint32_t cell) const;
  int64_t room(uint32_t cell) const { return zr::round_up(cells_.all()[cell].size, align_); }
  int64_t bytes(uint32_t cell) const { return room(cell) * width_; }
  bool take(uint32_t cell);
  void take_apart(uint32_t cell, uint32_t phase);
  zr_view alloc_apart(int64_t bytes, bool stays);
  void free_apart(const zr_view& memory);
  bool drop_farthest(int64_t beyond);
  void drop(uint32_t cell);
  void start(uint32_t cell);
  void arrive(uint32_t cell);
  void changed(uint32_t cell);

  const zr_plan_in* in_;
  const Cells& cells_;
  const Limits limits_;
  zr::Comm comm_;
  zr::Host host_;
  const zr_view shard_, window_view_;
  const int64_t align_, width_;
  Window window_;
  Trace trace_;
  std::vector<Live> live_;                    // by cell
  std::vector<uint32_t> held_;                // cells that are not absent
  std::multimap<int64_t, zr_view> spare_;     // by bytes: memory apart that no cell is in
  std::vector<std::vector<int64_t>> counts_;  // by cell: elements of each rank's part
  int64_t live_bytes_ = 0, ahead_bytes_ = 0;
  size_t next_ = 0;  // the place of the recorded order up to which cells were gathered ahead
  int changes_ = 0;  // of the order
  bool told_apart_ = false;
};

}  // namespace zero3
