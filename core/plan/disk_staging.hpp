// Sums and shards on disk: what of host memory they pass through, and which of their blocks stay there.
#pragma once

#include <cstdint>
#include <vector>

namespace zr::host {

struct MemoryPlan;

/// Chunks of a rank's sums and new weights that are under way at a time: one is read ahead, one is worked on, one is
/// written behind.
inline constexpr int64_t kChunksInFlight = 3;

struct DiskStaging {
  bool any = false;  // some buffer stands on a disk
  /// By buffer of the plan: blocks that stay in memory, as parts of them are written at different times. Ascending.
  std::vector<std::vector<int64_t>> resident_blocks;
  int64_t resident_bytes = 0;
  int64_t collective_bytes = 0;  // for what is under way in collectives; more is taken where they are larger
  int64_t chunk_gradients = 0, chunk_weights = 0;  // bytes of one chunk; 0: they stand in memory
  int64_t align = 64;                              // the largest of the tiers
  /// All chunks under way, and all host memory that is planned.
  int64_t chunk_bytes() const { return kChunksInFlight * (chunk_gradients + chunk_weights); }
  int64_t bytes() const { return resident_bytes + collective_bytes + chunk_bytes(); }
};

/// Of a plan whose placement is decided.
DiskStaging plan_disk_staging(const MemoryPlan& plan);

}  // namespace zr::host
