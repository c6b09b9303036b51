// The order in which a micro-step uses groups: recorded in the first micro-step, followed in later ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace zero3 {

/// Depends only on the uses, so it is the same on all ranks that run the same model.
class ExecutionOrder {
 public:
  static constexpr int64_t kNever = INT64_MAX;

  /// size: for each group, bytes of its gather.
  explicit ExecutionOrder(std::vector<int64_t> size) : size_(std::move(size)), uses_(size_.size()) {}

  /// Records the use of a group. Returns false if the recorded order has another group at this position; then there is
  /// no order to follow until the end of the pass, and this pass becomes the recorded order.
  bool use(uint32_t group) {
    recorded_.push_back(group);
    if (!follows_) return true;
    if (at_ < order_.size() && order_[at_] == group) {
      ++at_;
      return true;
    }
    follows_ = false;
    return false;
  }
  /// Ends the pass.
  void end() {
    if (!recorded_.empty() && (!follows_ || at_ != order_.size())) learn();
    recorded_.clear();
    follows_ = !order_.empty();
    at_ = 0;
  }

  bool follows() const { return follows_; }
  /// The number of uses so far in this pass, and the recorded order: valid while follows().
  size_t at() const { return at_; }
  const std::vector<uint32_t>& order() const { return order_; }
  /// The position of the group's next use, or order().size().
  size_t next(uint32_t group) const {
    const auto position = std::lower_bound(uses_[group].begin(), uses_[group].end(), at_);
    return position == uses_[group].end() ? order_.size() : *position;
  }
  /// Bytes used between now and the group's next use, or kNever.
  int64_t distance(uint32_t group) const {
    if (!follows_) return kNever;
    const size_t position = next(group);
    return position == order_.size() ? kNever : before_[position] - before_[at_];
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
  std::vector<std::vector<size_t>> uses_;  // by group: its positions in order_
  std::vector<int64_t> before_;            // by position: bytes used before it
  size_t at_ = 0;
  bool follows_ = false;
};

}  // namespace zero3
