// The gradient side of a sharding strategy: gradients fill buckets, and each full bucket leaves by a reduce-scatter
// into its owners' sums, all buckets in one order.
//
// Buckets either take turns in two rooms, or stand side by side in one buffer that holds a whole gradient. The author
// says where each run of a parameter stands in its bucket, and which part of the bucket each rank sums up; what a part
// holds, and where the sums stand, is the author's. grad_destination and grad_ready of a strategy are destination() and
// ready().
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "zr/strategy.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// One bucket: rank 0's part, then rank 1's, and so on.
struct GradientBucket {
  /// Elements [first, first + count) of a parameter stand at `offset` of the bucket. A run may lie in several parts.
  struct Run {
    uint32_t param;
    int64_t first, count, offset;
  };
  std::vector<Run> runs;        // of trainable parameters, in any order; what no run covers is alignment
  std::vector<int64_t> counts;  // elements of each rank's part, alignment included
  /// Elements in all.
  int64_t size() const {
    int64_t elements = 0;
    for (const int64_t count : counts) elements += count;
    return elements;
  }
};

/// Where gradients stand until they leave.
enum class GradientMemory { double_buffered, full };

/// The memory of a strategy that would choose `usual`: whole where the host holds gradients over micro-steps.
inline GradientMemory gradient_memory(const zr_plan_in& in, GradientMemory usual) {
  const bool hold = ZR_HAS(&in, zr_plan_in, flags) && (in.flags & ZR_PLAN_HOLD_GRADS);
  return hold ? GradientMemory::full : usual;
}
/// One micro-batch of whole gradients of the sums' dtype: the gradients are their own sums, reduced in place.
inline bool reduces_in_place(const zr_plan_in& in, GradientMemory memory) {
  return memory == GradientMemory::full && in.accumulation == 1 && in.grad_dtype == in.reduced_grad_dtype;
}

/// Made in bind(); not thread-safe, as the strategy that holds it. [use]
class GradientBuckets {
 public:
  static constexpr uint32_t kBucketBuffers = 2;
  /// For plan(): its buffers, of buckets with `largest` elements at most and `total` in all. Returns the first's
  /// number; the next free one is that + buffers(memory). In the whole buffer buckets stand from the last that leaves
  /// to the first.
  static uint32_t plan(const zr_plan_in& in, GradientMemory memory, int64_t largest, int64_t total, PlanBuilder& plan) {
    if (memory == GradientMemory::full) return plan.buffer(ZR_ROLE_GRAD, "gradients, whole", total, in.grad_dtype);
    const uint32_t first = plan.buffer(ZR_ROLE_BUCKET, "gradient bucket", largest, in.grad_dtype);
    for (uint32_t i = 1; i < kBucketBuffers; ++i)
      plan.buffer(ZR_ROLE_BUCKET, "gradient bucket", largest, in.grad_dtype);
    return first;
  }
  static constexpr uint32_t buffers(GradientMemory memory) {
    return memory == GradientMemory::full ? 1 : kBucketBuffers;
  }

  /// buckets: in the order they leave. buffers: those that plan() asked for. sums: by bucket, this rank's part, of
  /// in.reduced_grad_dtype; under reduces_in_place() it is the bucket's own part of the whole buffer.
  GradientBuckets(const zr_plan_in& in, GradientMemory memory, std::vector<GradientBucket> buckets, const Comm& comm,
                  const zr_view* buffers, std::vector<zr_view> sums)
      : comm_(comm), sums_(std::move(sums)), begin_(in.n_params + 1) {
    int64_t base = 0;
    for (const GradientBucket& bucket : buckets) base += bucket.size();
    if (memory == GradientMemory::double_buffered) memory_.assign(buffers, buffers + kBucketBuffers);
    for (GradientBucket& bucket : buckets) {
      const auto b = static_cast<uint32_t>(counts_.size());
      size_.push_back(bucket.size());
      base -= size_.back();
      if (memory == GradientMemory::full) memory_.push_back(part(*buffers, base, size_.back()));
      live_.push_back(0);
      for (const GradientBucket::Run& run : bucket.runs) {
        live_.back() += run.count;
        placements_.push_back({run.param, b, run.first, run.count, run.offset, 0});
      }
      counts_.push_back(std::move(bucket.counts));
      label_.push_back("bucket " + std::to_string(b));
    }
    // A parameter's runs are placed in the order in which their buckets leave, so that one of many buckets fits two
    // rooms.
    std::sort(placements_.begin(), placements_.end(), [](const Placement& x, const Placement& y) {
      return std::tuple(x.param, x.bucket, x.first) < std::tuple(y.param, y.bucket, y.first);
    });
    for (const Placement& placement : placements_) ++begin_[placement.param + 1];
    for (std::size_t p = 1; p < begin_.size(); ++p) begin_[p] += begin_[p - 1];
    for (std::size_t i = 1; i < placements_.size(); ++i)
      if (placements_[i].param == placements_[i - 1].param)
        placements_[i].before = placements_[i - 1].before + placements_[i - 1].count;
    for (uint32_t i = 0; i < placements_.size(); ++i) by_first_.push_back(i);
    std::sort(by_first_.begin(), by_first_.end(), [&](uint32_t x, uint32_t y) {
      return std::pair(placements_[x].param, placements_[x].first) <
             std::pair(placements_[y].param, placements_[y].first);
    });
    left_.resize(memory_.size());
    expect_all();
  }

  /// grad_destination.
  zr_view destination(uint32_t param, int64_t& first) {
    const auto begin = placements_.begin() + begin_[param], end = placements_.begin() + begin_[param + 1];
    const int64_t placed = first;
    const Placement& at =
        *std::prev(std::upper_bound(begin, end, placed, [](int64_t n, const Placement& p) { return n < p.before; }));
    if (at.bucket >= leaving_ + memory_.size()) return {};  // its room holds a bucket that is still filling
    left_[at.bucket % memory_.size()].wait();               // ... or one that peers still read
    const int64_t inside = placed - at.before;
    first = at.first + inside;
    return part(memory_[at.bucket % memory_.size()], at.offset + inside, at.count - inside);
  }
  /// grad_ready.
  void ready(uint32_t param, int64_t first, int64_t count, uint32_t micro) {
    missing_[find(param, first).bucket] -= count;
    for (; leaving_ < missing_.size() && missing_[leaving_] == 0; ++leaving_) {
      const std::size_t buffer = leaving_ % memory_.size();
      // The first micro-step folds from +0, so that no sum need be cleared.
      left_[buffer] = comm_.start(reduce_scatter(part(memory_[buffer], 0, size_[leaving_]), sums_[leaving_],
                                                 label_[leaving_].c_str(), micro > 0 ? ZR_COLL_ACCUMULATE : 0,
                                                 counts_[leaving_].data()));
    }
  }
  /// ZR_BACKWARD_END: the sums are there, and the next backward may write where peers have read.
  void backward_end() {
    for (Done& done : left_) {
      done.wait();
      done = Done();
    }
    expect_all();
  }

 private:
  struct Placement {
    uint32_t param, bucket;
    int64_t first, count, offset;
    int64_t before;  // elements of the parameter that are placed ahead of these
  };
  const Placement& find(uint32_t param, int64_t first) const {
    const auto begin = by_first_.begin() + begin_[param], end = by_first_.begin() + begin_[param + 1];
    return placements_[*std::prev(
        std::upper_bound(begin, end, first, [&](int64_t at, uint32_t i) { return at < placements_[i].first; }))];
  }
  void expect_all() {
    leaving_ = 0;
    missing_ = live_;
  }

  Comm comm_;
  std::vector<zr_view> memory_;               // by room, or by bucket
  std::vector<Done> left_;                    // likewise: the bucket that last left from there
  std::vector<zr_view> sums_;                 // by bucket, as all that follow
  std::vector<int64_t> size_;                 // elements
  std::vector<int64_t> live_;                 // of them announced in each micro-step: alignment never is
  std::vector<int64_t> missing_;              // of them not yet ready in this micro-step
  std::vector<std::vector<int64_t>> counts_;  // of every rank
  std::vector<std::string> label_;
  std::vector<Placement> placements_;  // by parameter, in the order its buckets leave
  std::vector<uint32_t> by_first_;     // of placements_: by parameter, ascending
  std::vector<std::ptrdiff_t> begin_;  // by parameter: its first in both
  std::size_t leaving_ = 0;            // the bucket that leaves next
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
