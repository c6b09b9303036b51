// A layout that many strategies use: all parameters in one flat sequence, cut into buckets; each bucket is cut over the
// ranks.
//
// Trainable parameters come first, in the model's order, then frozen ones; each starts at a multiple of
// zr_plan_in.align. Buckets are ranges of the trainable part in the order in which they are sent: from the end, as
// backward visits parameters. Every cut between buckets or ranks is at an edge of a block (cut_block()), or between
// parameters.
// Pure; immutable after construction. [any]
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "zr/abi/strategy.h"
#include "zr/base.hpp"
#include "zr/round_up.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// Elements of the blocks between which a strategy may cut the parameter: a multiple of zr_plan_in.norm_block, or at
/// least the parameter's count.
inline int64_t cut_block(const zr_plan_in& in, const zr_param& param) {
  return ZR_FITS(&param, zr_param, cut_block) ? std::max(in.norm_block, param.cut_block) : in.norm_block;
}

/// The cost of an update of the parameter: its elements, unless the optimizer has reported another one.
inline double update_cost(const zr_param& param) {
  return ZR_HAS(&param, zr_param, update_cost) ? param.update_cost : static_cast<double>(param.count);
}

/// Assigns parts of the update to ranks, for parameters that cannot be cut evenly.
class CostBalance {
 public:
  /// No rank has a part yet.
  explicit CostBalance(int32_t world) : assigned_(static_cast<std::size_t>(world), 0) {}
  /// True if all trainable parameters may be cut at norm blocks and cost as much as their elements.
  static bool is_even(const zr_plan_in& in) {
    for (uint32_t p = 0; p < in.n_params; ++p) {
      const zr_param& param = *in.params[p];
      const bool frozen = (param.flags & ZR_PARAM_FROZEN) != 0;
      if (!frozen && (cut_block(in, param) > in.norm_block || update_cost(param) != static_cast<double>(param.count)) &&
          param.count > in.norm_block)
        return false;
    }
    return true;
  }
  /// For every rank but the last: the end of its part of `cost`, if all ranks are to have assigned costs that are as
  /// equal as possible.
  std::vector<double> ends(double cost) const {
    std::vector<double> sorted = assigned_;
    std::sort(sorted.begin(), sorted.end());
    double level = 0, below = 0;  // the ranks with the least cost are raised to this level
    for (std::size_t n = 1; n <= sorted.size(); ++n) {
      below += sorted[n - 1];
      level = (cost + below) / static_cast<double>(n);
      if (n == sorted.size() || level <= sorted[n]) break;
    }
    std::vector<double> list;
    double end = 0;
    for (std::size_t r = 0; r + 1 < assigned_.size(); ++r) {
      end += std::max(0.0, level - assigned_[r]);
      list.push_back(end);
    }
    return list;
  }
  /// Rank r has got a part of this cost.
  void assign(std::size_t r, double cost) { assigned_[r] += cost; }
  const std::vector<double>& assigned() const { return assigned_; }  // cost by rank

 private:
  std::vector<double> assigned_;
};

/// The layout of one model for one rank count. The comment of this file describes it.
class FlatLayout {
 public:
  /// Flat elements [begin, end).
  struct FlatRange {
    int64_t begin, end;                           // flat elements
    int64_t size() const { return end - begin; }  // elements
  };

  /// `in` must outlive the layout. bucket_elements: the largest size of a bucket, but at least one block.
  FlatLayout(const zr_plan_in& in, int64_t bucket_elements) : in_(&in), offset_(in.n_params) {
    for (const bool frozen : {false, true}) {
      for (uint32_t p = 0; p < in.n_params; ++p) {
        if (((in.params[p]->flags & ZR_PARAM_FROZEN) != 0) != frozen) continue;
        offset_[p] = total_;
        if (!frozen) {
          start_.push_back(total_);
          elements_before_param_.push_back(trainable_elements_);
          cost_before_param_.push_back(cost_);
          cost_ += update_cost(*in.params[p]);
          param_.push_back(p);
          trainable_elements_ += in.params[p]->count;
        }
        total_ += round_up(in.params[p]->count, in.align);
      }
      if (!frozen) trainable_ = total_;
    }
    for (int64_t end = trainable_; end > 0;) {
      int64_t begin = edge(std::max<int64_t>(0, end - bucket_elements), true);
      if (begin >= end) begin = edge(end - 1, false);
      buckets_.push_back({begin, end});
      end = begin;
    }
    if (!CostBalance::is_even(in)) cut_by_cost();
  }

  int64_t trainable() const { return trainable_; }                           // flat elements, padding included
  int64_t total() const { return total_; }                                   // with frozen parameters
  int64_t offset(uint32_t param) const { return offset_[param]; }            // flat offset of a parameter
  int64_t count(uint32_t param) const { return in_->params[param]->count; }  // its elements, without padding

  const std::vector<FlatRange>& buckets() const { return buckets_; }  // in the order in which they are sent
  int64_t largest_bucket() const {                                    // elements
    int64_t elements = 0;
    for (const FlatRange& bucket : buckets_) elements = std::max(elements, bucket.size());
    return elements;
  }
  /// Elements of parameters in a range of the trainable part, padding excluded.
  int64_t element_count(const FlatRange& range) const {
    return elements_before(range.end) - elements_before(range.begin);
  }

  /// Rank r's part of a bucket. The size of a part differs from the mean by less than a norm block, unless the
  /// optimizer needs larger parts complete or reports costs: then the costs of the ranks are balanced over all buckets.
  FlatRange part(std::size_t bucket, int32_t rank) const {
    if (!cuts_.empty()) {
      const std::vector<int64_t>& cuts = cuts_[bucket];
      return {cuts[static_cast<std::size_t>(rank)], cuts[static_cast<std::size_t>(rank) + 1]};
    }
    const FlatRange& b = buckets_[bucket];
    return {cut(b, rank), cut(b, rank + 1)};
  }
  /// Elements of every rank's part, for a collective's counts.
  std::vector<int64_t> counts(std::size_t bucket) const {
    std::vector<int64_t> counts;
    for (int32_t r = 0; r < in_->world; ++r) counts.push_back(part(bucket, r).size());
    return counts;
  }

  /// Calls fn(param, first, count, flat offset) for every parameter's elements in a range of the trainable part,
  /// ascending.
  template <class F>
  void pieces(const FlatRange& range, F&& fn) const {
    if (range.size() <= 0 || start_.empty()) return;
    for (std::size_t i = index_of(range.begin); i < start_.size() && start_[i] < range.end; ++i) {
      const int64_t count = in_->params[param_[i]]->count;
      const int64_t first = std::max<int64_t>(0, range.begin - start_[i]),
                    last = std::min(count, range.end - start_[i]);
      if (last > first) fn(param_[i], first, last - first, start_[i] + first);
    }
  }

 private:
  // The trainable parameter (as an index of start_) whose elements or padding contain a flat element.
  std::size_t index_of(int64_t element) const {
    return static_cast<std::size_t>(std::upper_bound(start_.begin(), start_.end(), element) - start_.begin()) - 1;
  }
  int64_t block_of(std::size_t i) const { return cut_block(*in_, *in_->params[param_[i]]); }
  // The nearest edge of a block at or above (up), or else at or below, a flat element.
  int64_t edge(int64_t element, bool up) const {
    if (element <= 0 || start_.empty()) return 0;
    if (element >= trainable_) return trainable_;
    const std::size_t i = index_of(element);
    const int64_t inside = element - start_[i], next = i + 1 < start_.size() ? start_[i + 1] : trainable_;
    if (up && inside > 0 && inside >= in_->params[param_[i]]->count) return next;
    const int64_t block = block_of(i), down = inside / block * block;
    if (!up || down == inside) return start_[i] + std::min(down, last_edge(i));
    const int64_t above = down + block;
    return above < in_->params[param_[i]]->count ? start_[i] + above : next;
  }
  // The offset of the last edge of a block inside a parameter.
  int64_t last_edge(std::size_t i) const {
    const int64_t count = in_->params[param_[i]]->count;
    return count == 0 ? 0 : (count - 1) / block_of(i) * block_of(i);
  }
  int64_t elements_before(int64_t element) const {
    if (element <= 0 || start_.empty()) return 0;
    if (element >= trainable_) return trainable_elements_;
    const std::size_t i = index_of(element);
    return elements_before_param_[i] + std::min(element - start_[i], in_->params[param_[i]]->count);
  }
  // The edge nearest to the begin of rank r's share of a bucket (shares count elements without padding).
  int64_t cut(const FlatRange& bucket, int32_t rank) const {
    if (rank <= 0) return bucket.begin;
    if (rank >= in_->world) return bucket.end;
    const int64_t before = elements_before(bucket.begin);
    const int64_t target = before + (elements_before(bucket.end) - before) / in_->world * rank +
                           (elements_before(bucket.end) - before) % in_->world * rank / in_->world;
    const auto at = std::upper_bound(elements_before_param_.begin(), elements_before_param_.end(), target) -
                    elements_before_param_.begin() - 1;
    const auto i = static_cast<std::size_t>(at);
    const int64_t element = start_[i] + target - elements_before_param_[i];
    const int64_t below = edge(element, false), above = edge(element, true);
    const int64_t nearest = target - elements_before(below) <= elements_before(above) - target ? below : above;
    return std::clamp(nearest, bucket.begin, bucket.end);
  }

  // The cost of all elements before a flat element.
  double cost_before(int64_t element) const {
    if (element <= 0 || start_.empty()) return 0;
    if (element >= trainable_) return cost_;
    const std::size_t i = index_of(element);
    const zr_param& param = *in_->params[param_[i]];
    const int64_t inside = std::min(element - start_[i], param.count);
    return cost_before_param_[i] +
           (inside == 0 ? 0 : update_cost(param) * static_cast<double>(inside) / static_cast<double>(param.count));
  }
  // The edge of a block whose cost_before() is nearest to `cost`.
  int64_t edge_at_cost(double cost) const {
    const auto after = std::upper_bound(cost_before_param_.begin(), cost_before_param_.end(), cost);
    const auto i = static_cast<std::size_t>(std::max<std::ptrdiff_t>(after - cost_before_param_.begin() - 1, 0));
    const zr_param& param = *in_->params[param_[i]];
    const double part = param.count == 0 ? 0 : (cost - cost_before_param_[i]) / update_cost(param);
    const int64_t element =
        start_[i] + std::clamp<int64_t>(static_cast<int64_t>(part * static_cast<double>(param.count)), 0, param.count);
    const int64_t below = edge(element, false), above = edge(element, true);
    return cost - cost_before(below) <= cost_before(above) - cost ? below : above;
  }
  void cut_by_cost() {
    CostBalance balance(in_->world);
    for (const FlatRange& bucket : buckets_) {
      const double before = cost_before(bucket.begin);
      std::vector<int64_t> cuts{bucket.begin};
      for (const double end : balance.ends(cost_before(bucket.end) - before))
        cuts.push_back(std::clamp(edge_at_cost(before + end), cuts.back(), bucket.end));
      cuts.push_back(bucket.end);
      for (std::size_t r = 0; r + 1 < cuts.size(); ++r)
        balance.assign(r, cost_before(cuts[r + 1]) - cost_before(cuts[r]));
      cuts_.push_back(std::move(cuts));
    }
  }

  const zr_plan_in* in_;
  std::vector<int64_t> offset_;  // by parameter
  std::vector<int64_t> start_,
      elements_before_param_;              // by trainable parameter: flat start, and elements before it without padding
  std::vector<double> cost_before_param_;  // by trainable parameter
  std::vector<uint32_t> param_;            // by trainable parameter: its index in the model's order
  std::vector<std::vector<int64_t>> cuts_;  // by bucket and rank, if costs are balanced
  double cost_ = 0;
  std::vector<FlatRange> buckets_;
  int64_t trainable_ = 0, total_ = 0, trainable_elements_ = 0;
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
