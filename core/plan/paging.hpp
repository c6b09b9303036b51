// Sums and shards on disk: what of host memory they pass through, and which of their blocks stay there.
#pragma once

#include <cstdint>
#include <vector>

namespace zr::host {

struct Plan;

/// Chunks of a rank's sums and new weights that are under way at a time: one is read ahead, one is worked on, one is
/// written behind.
inline constexpr int64_t kChunksUnderWay = 3;

struct Paging {
  bool any = false;  // some buffer stands on a disk
  /// By buffer of the plan: blocks that stay in memory, as parts of them are written at different times. Ascending.
  std::vector<std::vector<int64_t>> edges;
  int64_t edge_bytes = 0;
  int64_t collective_bytes = 0;  // for what is under way in collectives; more is taken where they are larger
  int64_t chunk_sums = 0, chunk_weights = 0;  // bytes of one chunk; 0: they stand in memory
  int64_t align = 64;                         // the largest of the places
  /// All chunks under way, and all host memory that is planned.
  int64_t chunk_bytes() const { return kChunksUnderWay * (chunk_sums + chunk_weights); }
  int64_t bytes() const { return edge_bytes + collective_bytes + chunk_bytes(); }
};

/// Of a plan whose placement is decided.
Paging paging_of(const Plan& plan);

}  // namespace zr::host
