// Allocation of gathered groups in one buffer, first fit.
#pragma once

#include <cstdint>
#include <map>

namespace zero3 {

/// Deterministic. Sizes and offsets are in elements.
class AllGatherBuffer {
 public:
  explicit AllGatherBuffer(int64_t elements) {
    if (elements > 0) free_[0] = elements;
  }
  /// Allocates; returns the offset, or -1 if no free range is large enough.
  int64_t allocate(int64_t elements) {
    for (auto free_range = free_.begin(); free_range != free_.end(); ++free_range) {
      if (free_range->second < elements) continue;
      const auto [offset, size] = *free_range;
      free_.erase(free_range);
      if (size > elements) free_[offset + elements] = size - elements;
      return offset;
    }
    return -1;
  }
  void release(int64_t offset, int64_t elements) {
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + elements == next->first) {
      elements += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += elements;
        return;
      }
    }
    free_[offset] = elements;
  }

 private:
  std::map<int64_t, int64_t> free_;  // free ranges: offset, size
};

}  // namespace zero3
