// Reduced gradients and weight shards on disk: the host memory for their transfer, and the blocks that stay in memory.
#pragma once

#include <cstdint>
#include <vector>

namespace zr::host::plan {

struct MemoryPlan;

/// Chunks of a rank's reduced gradients and new weights in flight at a time: one is prefetched, one is updated, one is
/// written back.
inline constexpr int64_t kChunksInFlight = 3;

struct DiskStaging {
  bool any = false;  // at least one buffer is on a disk
  /// Per buffer of the plan, ascending: blocks that stay in memory because parts of them are written at different
  /// times.
  std::vector<std::vector<int64_t>> resident_blocks;
  int64_t resident_bytes = 0;
  int64_t collective_bytes = 0;                    // for collectives in flight; larger collectives take more
  int64_t chunk_gradients = 0, chunk_weights = 0;  // bytes of one chunk; 0: not on a disk
  int64_t align = 64;                              // largest alignment of the tiers, bytes
  /// Bytes of all chunks in flight; all planned host memory.
  int64_t chunk_bytes() const { return kChunksInFlight * (chunk_gradients + chunk_weights); }
  int64_t bytes() const { return resident_bytes + collective_bytes + chunk_bytes(); }
};

/// The staging of a plan whose tiers are assigned.
DiskStaging plan_disk_staging(const MemoryPlan& plan);

}  // namespace zr::host::plan
