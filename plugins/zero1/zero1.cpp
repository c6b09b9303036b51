// ZeRO-1: every rank has all weights; the optimizer's states, and the sums it reads, are cut over the ranks.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "zr/flat_layout.hpp"
#include "zr/strategy.hpp"

namespace {

class Zero1 : public zr::Strategy<Zero1> {
 public:
  static constexpr zr_key keys[] = {
      zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15, "gradients and weights travel in buckets of this size")};
  explicit Zero1(const zr::Config& config) : bucket_bytes_(config.integer("bucket_bytes")) {}

  void plan(const zr_plan_in& in, zr::Plan& plan) const {
    const zr::FlatLayout layout = lay_out(in);
    const uint32_t weights = plan.buffer(ZR_ROLE_WEIGHT, "weights, whole", layout.total(), in.weight_dtype);
    const uint32_t gradients =
        plan.buffer(ZR_ROLE_GRAD, "gradients of one backward", layout.trainable(), in.grad_dtype);
    const bool apart = sums_apart(in);
    const uint32_t sums =
        apart ? plan.buffer(ZR_ROLE_SUM, "gradient sums, own part", own_elements(layout, in.rank), in.sum_dtype)
              : gradients;
    for (uint32_t p = 0; p < in.n_params; ++p)
      if (in.params[p]->count > 0) plan.piece(ZR_ROLE_WEIGHT, p, weights, 0, in.params[p]->count, layout.offset(p));
    // Buckets stand from the end; pieces ascend.
    int64_t base = 0;
    for (std::size_t b = layout.buckets().size(); b-- > 0;) {
      const auto part = layout.part(b, in.rank);
      layout.pieces(part, [&](uint32_t param, int64_t first, int64_t count, int64_t offset) {
        plan.piece(ZR_ROLE_SUM, param, sums, first, count, apart ? base + offset - part.begin : offset);
      });
      base += part.size();
    }
  }

  void bind(const zr_plan_in& in, const zr::Bound& bound) {
    layout_.emplace(lay_out(in));
    comm_.emplace(bound.comm);
    weights_ = bound.buffers[0];
    gradients_ = bound.buffers[1];
    apart_ = sums_apart(in);
    const std::size_t n = layout_->buckets().size();
    parts_.resize(n);
    counts_.resize(n);
    sums_.resize(n);
    label_.resize(n);
    int64_t base = 0;
    for (std::size_t b = n; b-- > 0;) {
      parts_[b] = layout_->part(b, in.rank);
      counts_[b] = layout_->counts(b);
      sums_[b] = apart_ ? zr::part(bound.buffers[2], base, parts_[b].size())
                        : zr::part(gradients_, parts_[b].begin, parts_[b].size());
      base += parts_[b].size();
      label_[b] = "bucket " + std::to_string(b);
    }
    expect_all();
  }

  zr_view grad_place(uint32_t param, int64_t first, uint32_t) {
    const int64_t begin = layout_->offset(param) + first;
    const auto& bucket = layout_->buckets()[layout_->bucket_of(begin)];
    return zr::part(gradients_, begin, std::min(bucket.end - begin, layout_->count(param) - first));
  }

  void grad_ready(uint32_t param, int64_t first, int64_t count, uint32_t micro) {
    missing_[layout_->bucket_of(layout_->offset(param) + first)] -= count;
    for (; leaving_ < missing_.size() && missing_[leaving_] == 0; ++leaving_) {
      const auto& bucket = layout_->buckets()[leaving_];
      // The first micro-step folds from +0, so that no sum need be cleared.
      pending_.push_back(comm_->start(
          zr::reduce_scatter(zr::part(gradients_, bucket.begin, bucket.size()), sums_[leaving_],
                             label_[leaving_].c_str(), micro > 0 ? ZR_COLL_ACCUMULATE : 0, counts_[leaving_].data())));
    }
  }

  void event(uint32_t kind, uint32_t) {
    if (kind != ZR_BACKWARD_END) return;
    // The next backward writes where peers may still read.
    for (const zr::Done& done : pending_) done.wait();
    pending_.clear();
    expect_all();
  }

  void grads_finish() {}

  void updated() {
    for (std::size_t b = 0; b < parts_.size(); ++b) {
      const auto& bucket = layout_->buckets()[b];
      pending_.push_back(comm_->start(zr::all_gather(zr::part(weights_, parts_[b].begin, parts_[b].size()),
                                                     zr::part(weights_, bucket.begin, bucket.size()), label_[b].c_str(),
                                                     counts_[b].data())));
    }
    for (const zr::Done& done : pending_) done.wait();
    pending_.clear();
  }

 private:
  zr::FlatLayout lay_out(const zr_plan_in& in) const { return {in, bucket_bytes_ / zr::bytes_of(in.grad_dtype)}; }
  // One micro-batch of fp32 gradients is its own sum.
  static bool sums_apart(const zr_plan_in& in) { return in.accumulation > 1 || in.grad_dtype != in.sum_dtype; }
  static int64_t own_elements(const zr::FlatLayout& layout, int32_t rank) {
    int64_t elements = 0;
    for (std::size_t b = 0; b < layout.buckets().size(); ++b) elements += layout.part(b, rank).size();
    return elements;
  }
  void expect_all() {
    leaving_ = 0;
    missing_.clear();
    for (const auto& bucket : layout_->buckets()) missing_.push_back(layout_->live(bucket));
  }

  int64_t bucket_bytes_;
  std::optional<zr::FlatLayout> layout_;
  std::optional<zr::Comm> comm_;
  zr_view weights_{}, gradients_{};
  bool apart_ = false;
  std::vector<zr::FlatLayout::Range> parts_;  // by bucket: this rank's
  std::vector<std::vector<int64_t>> counts_;  // by bucket: every rank's
  std::vector<std::string> label_;            // by bucket
  std::vector<zr_view> sums_;                 // by bucket: this rank's
  std::vector<int64_t> missing_;              // by bucket: live elements not yet ready in this micro-step
  std::size_t leaving_ = 0;                   // the bucket that leaves next
  std::vector<zr::Done> pending_;
};

}  // namespace

ZR_STRATEGY(Zero1, "zero1", "zeroth", "1.0.0");
