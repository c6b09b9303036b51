// Counting the bytes a rank receives, without what is only alignment.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "zr/abi/communicator.h"

namespace zr::host {

/// Bytes received by this rank, unpadded, by operation; `control` is the host's own traffic (agreement, export).
struct CommVolume {
  std::array<int64_t, 16> bytes{};  // by ZR_ALL_REDUCE...
  std::array<int64_t, 16> calls{};
  int64_t control_bytes = 0;
  int64_t total() const;  // without control
  /// Adds the other's bytes and calls to these.
  CommVolume& operator+=(const CommVolume& other);
};

/// Runs of live elements of a planned buffer: what is not alignment padding. Ascending, disjoint.
struct LiveRuns {
  const char* base;
  zr_dtype dtype;
  int64_t elements;
  std::vector<std::pair<int64_t, int64_t>> runs;  // [first, end) in elements
};

class CommVolumeCounter {
 public:
  CommVolumeCounter(int rank, int world) : rank_(rank), world_(world) {}
  void set_live(LiveRuns live);  // of one more buffer
  /// The buffer at `base` is gone.
  void forget(const void* base);
  /// Bytes `coll` brings to this rank: what a communicator must move at least, each rank reducing an equal share of an
  /// all_reduce.
  int64_t received(const zr_coll& coll) const;
  void add(uint32_t op, int64_t bytes, bool control);
  const CommVolume& count() const { return count_; }

 private:
  struct Buffer {
    LiveRuns live;
    std::vector<int64_t> before;  // live elements before each run
    int64_t until(int64_t element) const;
  };
  const Buffer* find(const zr_view& view) const;
  // Live elements [first, first + count) of dst if it is a planned buffer's, else of src if that is; else all of them.
  int64_t live(const zr_view& dst, int64_t dst_first, const zr_view& src, int64_t src_first, int64_t count) const;

  int rank_, world_;
  std::vector<Buffer> buffers_;
  CommVolume count_;
};

}  // namespace zr::host
