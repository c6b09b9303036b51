// For strategies whose ranks all hold every weight, in a FlatLayout: its gradient buckets, the all-gather of the parts
// that the ranks own, and, for strategies that shard reduced gradients, both combined in one class.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zr/flat_layout.hpp"
#include "zr/gradient_buckets.hpp"
#include "zr/strategy.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// The layout's buckets, in the order in which they are sent; a rank's part is FlatLayout::part.
inline std::vector<GradientBucket> gradient_buckets(const FlatLayout& layout) {
  std::vector<GradientBucket> buckets;
  for (std::size_t b = 0; b < layout.buckets().size(); ++b) {
    const FlatLayout::FlatRange& bucket = layout.buckets()[b];
    buckets.push_back({{}, layout.counts(b)});
    layout.pieces(bucket, [&](uint32_t param, int64_t first, int64_t count, int64_t offset) {
      buckets.back().ranges.push_back({param, first, count, offset - bucket.begin});
    });
  }
  return buckets;
}

/// For plan(): a piece for every full parameter, at its flat offset.
inline void plan_full(const zr_plan_in& in, const FlatLayout& layout, uint32_t role, uint32_t buffer,
                      PlanBuilder& plan) {
  for (uint32_t p = 0; p < in.n_params; ++p)
    if (in.params[p]->count > 0 && (role == ZR_ROLE_WEIGHT || !(in.params[p]->flags & ZR_PARAM_FROZEN)))
      plan.piece(role, p, buffer, 0, in.params[p]->count, layout.offset(p));
}

/// Starts to all-gather every rank's part of bucket `b`, in place. `flat` is the trainable part, or begins with it.
/// flags: see all_gather().
inline Done start_all_gather(const Comm& comm, const FlatLayout& layout, std::size_t b, const zr_view& flat,
                             uint32_t flags = 0) {
  const FlatLayout::FlatRange &bucket = layout.buckets()[b], own_part = layout.part(b, comm.rank());
  return comm.start(all_gather(part(flat, own_part.begin, own_part.size()), part(flat, bucket.begin, bucket.size()),
                               ("bucket " + std::to_string(b)).c_str(), layout.counts(b).data(), flags));
}
/// All-gathers every rank's part of every bucket; see start_all_gather().
inline void all_gather_parts(const Comm& comm, const FlatLayout& layout, const zr_view& flat, uint32_t flags = 0) {
  std::vector<Done> pending;
  for (std::size_t b = 0; b < layout.buckets().size(); ++b)
    pending.push_back(start_all_gather(comm, layout, b, flat, flags));
  for (const Done& done : pending) done.wait();
}

/// Weights on every rank; reduced gradients (and therefore master weights and optimizer states) sharded over the ranks.
class FlatShards {
 public:
  /// Created in plan() and again in bind(). `in` must outlive it. usual: the preferred memory of gradients, see
  /// gradient_memory().
  FlatShards(const zr_plan_in& in, int64_t bucket_bytes, GradientMemory usual)
      : in_(in), layout_(in, bucket_bytes / bytes_of(in.grad_dtype)), memory_(gradient_memory(in, usual)) {}

  /// The strategy's plan().
  void plan(PlanBuilder& plan) const {
    const uint32_t weights =
        plan.buffer(ZR_ROLE_WEIGHT, weights_tag(in_), layout_.total(), in_.weight_dtype, shared_weights_flag(in_));
    const uint32_t gradients = GradientBuckets::plan(in_, memory_, layout_.largest_bucket(), layout_.trainable(), plan);
    const uint32_t reduced_gradients =
        has_reduced_buffer()
            ? plan.buffer(ZR_ROLE_REDUCED_GRAD, "reduced gradients, own shard", own_elements(), in_.reduced_grad_dtype)
            : gradients;
    plan_full(in_, layout_, ZR_ROLE_WEIGHT, weights, plan);
    // Buckets are numbered from the end of the layout, while pieces must ascend.
    int64_t base = 0;
    for (std::size_t b = layout_.buckets().size(); b-- > 0;) {
      const auto own_part = layout_.part(b, in_.rank);
      layout_.pieces(own_part, [&](uint32_t param, int64_t first, int64_t count, int64_t offset) {
        plan.piece(ZR_ROLE_REDUCED_GRAD, param, reduced_gradients, first, count,
                   has_reduced_buffer() ? base + offset - own_part.begin : offset);
      });
      base += own_part.size();
    }
  }

  /// The strategy's bind(). Call it before the methods below, on an object that lives as long as the strategy.
  void bind(const Binding& bound) {
    weights_ = bound.buffers[0];
    comm_.emplace(bound.comm);
    const zr_view& reduced = bound.buffers[has_reduced_buffer() ? 1 + GradientBuckets::buffers(memory_) : 1];
    std::vector<zr_view> reduced_gradients(layout_.buckets().size());
    int64_t base = 0;
    for (std::size_t b = reduced_gradients.size(); b-- > 0;) {
      const auto own_part = layout_.part(b, in_.rank);
      reduced_gradients[b] = part(reduced, has_reduced_buffer() ? base : own_part.begin, own_part.size());
      base += own_part.size();
    }
    gradients_.emplace(in_, memory_, gradient_buckets(layout_), bound.comm, bound.buffers + 1,
                       std::move(reduced_gradients));
  }

  /// The gradient buckets.
  GradientBuckets& gradients() { return *gradients_; }
  /// After an update: gives every rank the weights that the other ranks have updated.
  void gather_weights() {
    const bool shared = shared_weights_flag(in_) != 0;
    if (shared && !several_hosts(in_)) return comm_->run(barrier("weights"));  // all ranks have written
    all_gather_parts(*comm_, layout_, weights_, shared ? ZR_COLL_SHARED : 0);
  }

 private:
  bool has_reduced_buffer() const { return !reduces_in_place(in_, memory_); }
  int64_t own_elements() const {
    int64_t elements = 0;
    for (std::size_t b = 0; b < layout_.buckets().size(); ++b) elements += layout_.part(b, in_.rank).size();
    return elements;
  }

  const zr_plan_in& in_;
  FlatLayout layout_;
  GradientMemory memory_;
  std::optional<Comm> comm_;
  std::optional<GradientBuckets> gradients_;
  zr_view weights_{};
};

/// A complete strategy made of FlatShards. D derives from FlatStrategy<D, memory of gradients> and adds its keys and a
/// constructor that passes the bytes of a bucket.
template <class D, GradientMemory Gradients>
class FlatStrategy : public Strategy<D> {
 public:
  /// bucket_bytes: size of one gradient bucket.
  explicit FlatStrategy(int64_t bucket_bytes) : bucket_bytes_(bucket_bytes) {}
  /// Plans all weights, this rank's reduced gradients, and the memory of gradients.
  void plan(const zr_plan_in& in, PlanBuilder& plan) const { FlatShards(in, bucket_bytes_, Gradients).plan(plan); }
  /// Called once the memory is allocated.
  void bind(const zr_plan_in& in, const Binding& bound) {
    shards_.emplace(in, bucket_bytes_, Gradients);
    shards_->bind(bound);
  }
  /// The destination of the next elements of a gradient.
  zr_view grad_destination(uint32_t param, int64_t& first, const zr_use&) {
    return shards_->gradients().destination(param, first);
  }
  /// These elements have been written; sends the bucket if it is full.
  void grad_ready(uint32_t param, int64_t first, int64_t count, const zr_use& use) {
    shards_->gradients().ready(param, first, count, use.micro);
  }
  /// Completes the reduction at the end of a backward.
  void event(uint32_t kind, const zr_use&) {
    if (kind == ZR_BACKWARD_END) shards_->gradients().backward_end();
  }
  /// Does nothing: all buckets were reduced at the end of the backward.
  void grads_finish(const zr_use&) {}
  /// Gives every rank the updated weights of the other ranks.
  void updated(const zr_use&) { shards_->gather_weights(); }

 private:
  int64_t bucket_bytes_;
  std::optional<FlatShards> shards_;
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
