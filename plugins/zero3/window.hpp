// Room for gathered cells: one buffer, taken by first fit.
#pragma once

#include <cstdint>
#include <map>

namespace zero3 {

/// Deterministic. Sizes and places are elements.
class Window {
 public:
  explicit Window(int64_t elements) {
    if (elements > 0) free_[0] = elements;
  }
  /// Returns the place, or -1.
  int64_t take(int64_t elements) {
    for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
      if (hole->second < elements) continue;
      const auto [place, size] = *hole;
      free_.erase(hole);
      if (size > elements) free_[place + elements] = size - elements;
      return place;
    }
    return -1;
  }
  void give_back(int64_t place, int64_t elements) {
    auto next = free_.lower_bound(place);
    if (next != free_.end() && place + elements == next->first) {
      elements += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == place) {
        before->second += elements;
        return;
      }
    }
    free_[place] = elements;
  }

 private:
  std::map<int64_t, int64_t> free_;  // holes by place
};

}  // namespace zero3
