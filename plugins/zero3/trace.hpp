// The order in which a micro-step uses cells: recorded once, followed after that.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace zero3 {

/// A function of the uses alone, hence the same on all ranks that run the same model.
class Trace {
 public:
  static constexpr int64_t kNever = INT64_MAX;

  /// size: by cell, bytes of a gather.
  explicit Trace(std::vector<int64_t> size) : size_(std::move(size)), uses_(size_.size()) {}

  /// A cell is used. False: it is not the one that was recorded at this place; from here to the end there is no order
  /// to follow, and this pass is recorded instead.
  bool use(uint32_t cell) {
    recorded_.push_back(cell);
    if (!follows_) return true;
    if (at_ < order_.size() && order_[at_] == cell) {
      ++at_;
      return true;
    }
    follows_ = false;
    return false;
  }
  /// The pass is over.
  void end() {
    if (!recorded_.empty() && (!follows_ || at_ != order_.size())) learn();
    recorded_.clear();
    follows_ = !order_.empty();
    at_ = 0;
  }

  bool follows() const { return follows_; }
  /// Uses so far in this pass, and what was recorded: valid while follows().
  size_t at() const { return at_; }
  const std::vector<uint32_t>& order() const { return order_; }
  /// The place of the cell's next use, or order().size().
  size_t next(uint32_t cell) const {
    const auto place = std::lower_bound(uses_[cell].begin(), uses_[cell].end(), at_);
    return place == uses_[cell].end() ? order_.size() : *place;
  }
  /// Bytes used between now and the cell's next use, or kNever.
  int64_t distance(uint32_t cell) const {
    if (!follows_) return kNever;
    const size_t place = next(cell);
    return place == order_.size() ? kNever : before_[place] - before_[at_];
  }

 private:
  void learn() {
    order_ = recorded_;
    for (auto& uses : uses_) uses.clear();
    before_.assign(1, 0);
    for (size_t i = 0; i < order_.size(); ++i) {
      uses_[order_[i]].push_back(i);
      before_.push_back(before_.back() + size_[order_[i]]);
    }
  }

  std::vector<int64_t> size_;
  std::vector<uint32_t> order_, recorded_;
  std::vector<std::vector<size_t>> uses_;  // by cell: its places in order_
  std::vector<int64_t> before_;            // by place: bytes used before it
  size_t at_ = 0;
  bool follows_ = false;
};

}  // namespace zero3
