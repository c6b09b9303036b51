// The order in which a micro-step uses groups: recorded once, followed after that.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace zero3 {

/// A function of the uses alone, hence the same on all ranks that run the same model.
class ExecutionOrder {
 public:
  static constexpr int64_t kNever = INT64_MAX;

  /// size: by group, bytes of a gather.
  explicit ExecutionOrder(std::vector<int64_t> size) : size_(std::move(size)), uses_(size_.size()) {}

  /// A group is used. False: it is not the one that was recorded at this position; from here to the end there is no
  /// order to follow, and this pass is recorded instead.
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
  /// The place of the group's next use, or order().size().
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
  std::vector<std::vector<size_t>> uses_;  // by group: its places in order_
  std::vector<int64_t> before_;            // by place: bytes used before it
  size_t at_ = 0;
  bool follows_ = false;
};

}  // namespace zero3
