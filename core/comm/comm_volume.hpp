// Counts the bytes that a rank receives, without alignment padding.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "zr/abi/communicator.h"

namespace zr::host::comm {

/// Bytes received by this rank per operation, without padding. Control traffic is that of the engine itself (StepSync,
/// export).
struct CommVolume {
  std::array<int64_t, 16> bytes{};  // indexed by ZR_ALL_REDUCE...
  std::array<int64_t, 16> calls{};
  int64_t control_bytes = 0;
  int64_t total() const;  // without control
  /// Adds the bytes and calls of `other`.
  CommVolume& operator+=(const CommVolume& other);
};

/// The elements of a planned buffer that are not alignment padding, as ascending, disjoint ranges.
struct NonPaddingRanges {
  const char* base;
  zr_dtype dtype;
  int64_t elements;
  std::vector<std::pair<int64_t, int64_t>> ranges;  // [first, end) in elements
};

class CommVolumeCounter {
 public:
  CommVolumeCounter(int rank, int world, int hosts) : rank_(rank), world_(world), hosts_(hosts) {}
  /// Adds a buffer, or replaces the one at the same base.
  void set_planned_buffer(NonPaddingRanges buffer);
  /// Removes the buffer at `base`, which has been freed.
  void remove_buffer(const void* base);
  /// Bytes that this rank receives in `coll`: the minimum that a communicator must transfer, where each rank reduces an
  /// equal part of an all_reduce. reduce_scatter: (N-1) times its own part; all_gather: the parts of the others;
  /// all_reduce: both, with equal parts; reduce: (N-1) times the data, at the root. With ZR_COLL_SHARED what other
  /// hosts receive of it, since their ranks receive together.
  int64_t received_bytes(const zr_coll& coll) const;
  void add(uint32_t op, int64_t bytes, bool control);
  const CommVolume& count() const { return count_; }

 private:
  struct Buffer {
    NonPaddingRanges non_padding;
    std::vector<int64_t> preceding;  // for each range: the number of non-padding elements before it
    int64_t non_padding_before(int64_t element) const;
  };
  const Buffer* find(const zr_view& view) const;
  // The number of non-padding elements in [first, first + count) of dst if dst is in a planned buffer, else of src if
  // src is; otherwise `count`.
  int64_t non_padding_elements(const zr_view& dst, int64_t dst_first, const zr_view& src, int64_t src_first,
                               int64_t count) const;

  int rank_, world_, hosts_;
  std::vector<Buffer> buffers_;
  CommVolume count_;
};

}  // namespace zr::host::comm
