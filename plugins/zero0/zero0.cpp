// ZeRO-0, data parallel: every rank holds all state. With one reduction per step, each bucket is all-reduced while
// backward computes the next ones. With several, each rank adds up its part of every bucket over the micro-steps; in
// the last one the reduced gradients are then all-gathered, bucket by bucket.
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "zr/flat_shards.hpp"
#include "zr/strategy.hpp"

namespace {

class Zero0 : public zr::Strategy<Zero0> {
 public:
  static constexpr const char* description =
      "data parallel: every rank has all weights, gradients and optimizer states";
  static constexpr const char* license = "Apache-2.0";
  static constexpr uint32_t flags = uint32_t{ZR_STRATEGY_STREAMS} | ZR_STRATEGY_LOCAL_GRADS;
  static constexpr uint64_t device_types = zr::kAnyDevice;
  static constexpr zr_key keys[] = {zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15,
                                                  "size of a gradient bucket; two buckets are in use at a time")};
  explicit Zero0(const zr::Config& config) : bucket_bytes_(config.integer("bucket_bytes")) {}

  void plan(const zr_plan_in& in, zr::PlanBuilder& plan) const {
    const zr::FlatLayout layout = lay_out(in);
    const uint32_t weights = plan.buffer(ZR_ROLE_WEIGHT, "weights, unsharded", layout.total(), in.weight_dtype);
    const uint32_t gradients =
        zr::GradientBuckets::plan(in, memory(in), layout.largest_bucket(), layout.trainable(), plan);
    const uint32_t reduced_gradients = has_reduced_buffer(in)
                                           ? plan.buffer(ZR_ROLE_REDUCED_GRAD, "reduced gradients, unsharded",
                                                         layout.trainable(), in.reduced_grad_dtype)
                                           : gradients;
    zr::plan_full(in, layout, ZR_ROLE_WEIGHT, weights, plan);
    zr::plan_full(in, layout, ZR_ROLE_REDUCED_GRAD, reduced_gradients, plan);
  }

  void bind(const zr_plan_in& in, const zr::Binding& bound) {
    layout_.emplace(lay_out(in));
    comm_.emplace(bound.comm);
    reduced_gradients_ = bound.buffers[has_reduced_buffer(in) ? 1 + zr::GradientBuckets::buffers(memory(in)) : 1];
    all_reduces_ = in.accumulation == 1;
    std::vector<zr_view> reduced;
    for (std::size_t b = 0; b < layout_->buckets().size(); ++b) {
      const auto range = all_reduces_ ? layout_->buckets()[b] : layout_->part(b, in.rank);
      reduced.push_back(zr::part(reduced_gradients_, range.begin, range.size()));
    }
    gradients_.emplace(in, memory(in), gradient_buckets(*layout_), bound.comm, bound.buffers + 1, std::move(reduced),
                       all_reduces_ ? zr::ReducedOn::all : zr::ReducedOn::owners);
  }

  zr_view grad_destination(uint32_t param, int64_t& first, const zr_use&) {
    return gradients_->destination(param, first);
  }
  // The inputs of a collective must be complete when it is submitted, so a bucket is gathered only when it is reduced:
  // before the second bucket after it is sent, which double-buffered gradients have waited for anyway.
  void grad_ready(uint32_t param, int64_t first, int64_t count, const zr_use& use) {
    const bool gathers = !all_reduces_ && (use.flags & ZR_USE_LAST_MICRO) != 0;
    gradients_->ready(param, first, count, use.micro, [&](std::size_t bucket) {
      if (!gathers || bucket < zr::GradientBuckets::kBucketBuffers) return;
      const std::size_t reduced = bucket - zr::GradientBuckets::kBucketBuffers;
      gradients_->wait_reduced(reduced);
      gather_to(reduced + 1);
    });
  }
  void event(uint32_t kind, const zr_use& use) {
    if (kind == ZR_STEP_BEGIN) finish_gathers();  // of a step that was abandoned
    if (kind != ZR_BACKWARD_END || (use.flags & ZR_USE_LOCAL_GRADS)) return;
    gradients_->backward_end();
    if (use.flags & ZR_USE_LAST_MICRO) gather_to(layout_->buckets().size());
  }
  void grads_finish(const zr_use& use) {
    if (use.flags & ZR_USE_LOCAL_GRADS) return;
    gather_to(layout_->buckets().size());
    finish_gathers();
  }
  void updated(const zr_use&) {}  // every rank has updated every weight, from the same reduced gradients

 private:
  // Starts to gather the buckets before `end` that are not gathered in this step.
  void gather_to(std::size_t end) {
    while (!all_reduces_ && gathers_.size() < end)
      gathers_.push_back(
          zr::start_all_gather(*comm_, *layout_, gathers_.size(), reduced_gradients_, ZR_COLL_GRADIENTS));
  }
  void finish_gathers() {
    for (const zr::Done& gather : gathers_) gather.wait();
    gathers_.clear();
  }
  zr::FlatLayout lay_out(const zr_plan_in& in) const { return {in, bucket_bytes_ / zr::bytes_of(in.grad_dtype)}; }
  static zr::GradientMemory memory(const zr_plan_in& in) {
    return gradient_memory(in, zr::GradientMemory::double_buffered);
  }
  static bool has_reduced_buffer(const zr_plan_in& in) { return !reduces_in_place(in, memory(in)); }

  int64_t bucket_bytes_;
  std::optional<zr::FlatLayout> layout_;
  std::optional<zr::Comm> comm_;
  std::optional<zr::GradientBuckets> gradients_;
  zr_view reduced_gradients_{};
  bool all_reduces_ = false;       // instead of a reduction to the owners, and an all-gather
  std::vector<zr::Done> gathers_;  // by bucket: its all-gather in this step
};

}  // namespace

ZR_STRATEGY(Zero0, "zero0", "zeroth", "1.0.0");
