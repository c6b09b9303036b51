// Gradient communication of a sharding strategy: gradients fill buckets, and each full bucket is reduce-scattered into
// the reduced gradients of its owners, or all-reduced. Buckets are always sent in the same order.
//
// Buckets either share two bucket buffers in turn, or are side by side in one buffer that holds a full gradient. The
// author of the strategy decides where each range of a parameter is in its bucket, which part of the bucket each rank
// reduces, and where the reduced gradients are stored. grad_destination and grad_ready of the strategy call
// destination() and ready().
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
  /// Elements [first, first + count) of a parameter are at `offset` of the bucket. A range may span several parts.
  struct ParamRange {
    uint32_t param;                // index in the model's order
    int64_t first, count, offset;  // elements
  };
  std::vector<ParamRange> ranges;  // of trainable parameters, in any order; elements outside of all ranges are padding
  std::vector<int64_t> counts;     // elements of each rank's part, padding included
  /// Total elements, padding included.
  int64_t size() const {
    int64_t elements = 0;
    for (const int64_t count : counts) elements += count;
    return elements;
  }
};

/// Where gradients are stored until they are reduced: in two bucket buffers in turn, or in one buffer for the full
/// gradient.
enum class GradientMemory {
  double_buffered,  // one bucket buffer is filled while the other is reduced
  full,             // one buffer for all gradients
};

/// Who gets the reduced gradients of a bucket.
enum class ReducedOn {
  owners,  // each rank those of its own part: reduce-scatter
  all,     // every rank all of them: all-reduce, which starts from +0 in each micro-step
};

/// The gradient memory of a strategy that prefers `usual`: always `full` if the host accumulates gradients over
/// micro-steps (ZR_PLAN_HOLD_GRADS).
inline GradientMemory gradient_memory(const zr_plan_in& in, GradientMemory usual) {
  const bool hold = ZR_HAS(&in, zr_plan_in, flags) && (in.flags & ZR_PLAN_HOLD_GRADS);
  return hold ? GradientMemory::full : usual;
}
/// True if gradients are reduced in place: the full gradient is in memory, there is one micro-batch per step, and
/// gradients and reduced gradients have the same dtype.
inline bool reduces_in_place(const zr_plan_in& in, GradientMemory memory) {
  return memory == GradientMemory::full && in.accumulation == 1 && in.grad_dtype == in.reduced_grad_dtype;
}

/// Created in bind(). Not thread-safe, like the strategy that owns it. [use]
class GradientBuckets {
 public:
  static constexpr uint32_t kBucketBuffers = 2;  // one is filled while the other is reduced
  /// For plan(): requests the buffers. `largest`: elements of the largest bucket; `total`: of all buckets. Returns the
  /// number of the first buffer; the next free number is that + buffers(memory). In the buffer for the full gradient
  /// the buckets are stored in reverse order: the one that is sent last comes first.
  static uint32_t plan(const zr_plan_in& in, GradientMemory memory, int64_t largest, int64_t total, PlanBuilder& plan) {
    if (memory == GradientMemory::full) return plan.buffer(ZR_ROLE_GRAD, "gradients, unsharded", total, in.grad_dtype);
    const uint32_t first = plan.buffer(ZR_ROLE_BUCKET, "gradient bucket", largest, in.grad_dtype);
    for (uint32_t i = 1; i < kBucketBuffers; ++i)
      plan.buffer(ZR_ROLE_BUCKET, "gradient bucket", largest, in.grad_dtype);
    return first;
  }
  /// The number of buffers that plan() requests.
  static constexpr uint32_t buffers(GradientMemory memory) {
    return memory == GradientMemory::full ? 1 : kBucketBuffers;
  }

  /// buckets: in the order in which they are sent. buffers: those that plan() requested. reduced: for each bucket, the
  /// memory for this rank's reduced gradients (ReducedOn::all: for those of the full bucket), of
  /// in.reduced_grad_dtype; if reduces_in_place(), it is this rank's part of the bucket itself, or the full bucket.
  GradientBuckets(const zr_plan_in& in, GradientMemory memory, std::vector<GradientBucket> buckets, const Comm& comm,
                  const zr_view* buffers, std::vector<zr_view> reduced, ReducedOn reduced_on = ReducedOn::owners)
      : comm_(comm), reduced_on_(reduced_on), reduced_(std::move(reduced)), first_index_(in.n_params + 1) {
    int64_t base = 0;
    for (const GradientBucket& bucket : buckets) base += bucket.size();
    if (memory == GradientMemory::double_buffered) memory_.assign(buffers, buffers + kBucketBuffers);
    for (GradientBucket& bucket : buckets) {
      const auto b = static_cast<uint32_t>(counts_.size());
      size_.push_back(bucket.size());
      base -= size_.back();
      if (memory == GradientMemory::full) memory_.push_back(part(*buffers, base, size_.back()));
      expected_.push_back(0);
      for (const GradientBucket::ParamRange& range : bucket.ranges) {
        expected_.back() += range.count;
        placements_.push_back({range.param, b, range.first, range.count, range.offset, 0});
      }
      counts_.push_back(std::move(bucket.counts));
      label_.push_back("bucket " + std::to_string(b));
    }
    // The ranges of a parameter get their destinations in the order in which their buckets are sent, so that two bucket
    // buffers are enough for a parameter of many buckets.
    std::sort(placements_.begin(), placements_.end(), [](const Placement& x, const Placement& y) {
      return std::tuple(x.param, x.bucket, x.first) < std::tuple(y.param, y.bucket, y.first);
    });
    for (const Placement& placement : placements_) ++first_index_[placement.param + 1];
    for (std::size_t p = 1; p < first_index_.size(); ++p) first_index_[p] += first_index_[p - 1];
    for (std::size_t i = 1; i < placements_.size(); ++i)
      if (placements_[i].param == placements_[i - 1].param)
        placements_[i].before = placements_[i - 1].before + placements_[i - 1].count;
    for (uint32_t i = 0; i < placements_.size(); ++i) by_first_.push_back(i);
    std::sort(by_first_.begin(), by_first_.end(), [&](uint32_t x, uint32_t y) {
      return std::pair(placements_[x].param, placements_[x].first) <
             std::pair(placements_[y].param, placements_[y].first);
    });
    reductions_.resize(memory_.size());
    expect_all();
  }

  /// Implements grad_destination().
  zr_view destination(uint32_t param, int64_t& first) {
    const auto begin = placements_.begin() + first_index_[param], end = placements_.begin() + first_index_[param + 1];
    const int64_t position = first;
    const Placement& placement =
        *std::prev(std::upper_bound(begin, end, position, [](int64_t n, const Placement& p) { return n < p.before; }));
    if (placement.bucket >= next_to_send_ + memory_.size())
      return {};                                            // its buffer holds a bucket that is not full yet
    reductions_[placement.bucket % memory_.size()].wait();  // peers may still read the buffer's previous bucket
    const int64_t inside = position - placement.before;
    first = placement.first + inside;
    return part(memory_[placement.bucket % memory_.size()], placement.offset + inside, placement.count - inside);
  }
  /// Implements grad_ready().
  void ready(uint32_t param, int64_t first, int64_t count, uint32_t micro) {
    ready(param, first, count, micro, [](std::size_t) {});
  }
  /// As ready() without before_send; calls before_send(bucket) before each bucket is sent. What before_send submits has
  /// the same order on all ranks.
  template <class BeforeSend>
  void ready(uint32_t param, int64_t first, int64_t count, uint32_t micro, const BeforeSend& before_send) {
    missing_[find(param, first).bucket] -= count;
    for (; next_to_send_ < missing_.size() && missing_[next_to_send_] == 0; ++next_to_send_) {
      const std::size_t buffer = next_to_send_ % memory_.size();
      before_send(next_to_send_);
      reductions_[buffer] =
          comm_.start(reduction(next_to_send_, part(memory_[buffer], 0, size_[next_to_send_]), micro));
    }
  }
  /// Waits until a bucket is reduced, one of the last kBucketBuffers that were sent in this micro-step.
  void wait_reduced(std::size_t bucket) const { reductions_[bucket % memory_.size()].wait(); }
  /// Implements ZR_BACKWARD_END: on return all buckets are reduced, and the next backward may overwrite the buffers.
  void backward_end() {
    for (Done& done : reductions_) {
      done.wait();
      done = Done();
    }
    expect_all();
  }

 private:
  struct Placement {
    uint32_t param, bucket;
    int64_t first, count, offset;
    int64_t before;  // elements of the parameter that get their destination before these
  };
  // The first micro-step starts from +0, so that the reduced gradients need not be cleared.
  zr_coll reduction(std::size_t bucket, const zr_view& gradients, uint32_t micro) const {
    const char* const label = label_[bucket].c_str();
    if (reduced_on_ == ReducedOn::all) return all_reduce(gradients, reduced_[bucket], label, ZR_COLL_GRADIENTS);
    return reduce_scatter(gradients, reduced_[bucket], label,
                          ZR_COLL_GRADIENTS | (micro > 0 ? uint32_t{ZR_COLL_ACCUMULATE} : 0u), counts_[bucket].data());
  }
  const Placement& find(uint32_t param, int64_t first) const {
    const auto begin = by_first_.begin() + first_index_[param], end = by_first_.begin() + first_index_[param + 1];
    return placements_[*std::prev(
        std::upper_bound(begin, end, first, [&](int64_t at, uint32_t i) { return at < placements_[i].first; }))];
  }
  void expect_all() {
    next_to_send_ = 0;
    missing_ = expected_;
  }

  Comm comm_;
  ReducedOn reduced_on_;
  std::vector<zr_view> memory_;               // by bucket buffer, or (full) by bucket
  std::vector<Done> reductions_;              // same index: completion of the last reduction of this memory
  std::vector<zr_view> reduced_;              // by bucket: the reduced gradients that this rank gets
  std::vector<int64_t> size_;                 // by bucket: elements
  std::vector<int64_t> expected_;             // by bucket: elements announced in each micro-step (without padding)
  std::vector<int64_t> missing_;              // by bucket: elements not yet ready in this micro-step
  std::vector<std::vector<int64_t>> counts_;  // by bucket: elements of every rank's part
  std::vector<std::string> label_;            // by bucket
  std::vector<Placement> placements_;         // by parameter, in the order in which its buckets are sent
  std::vector<uint32_t> by_first_;            // indices of placements_: by parameter, then by first element
  std::vector<std::ptrdiff_t> first_index_;   // by parameter: index of its first entry in both lists
  std::size_t next_to_send_ = 0;              // the bucket that is sent next
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
