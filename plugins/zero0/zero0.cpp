// ZeRO-0, data parallel: every rank has everything. Each bucket is folded by the ranks in parts, the sums then go to
// all.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "zr/flat_layout.hpp"
#include "zr/strategy.hpp"

namespace {

class Zero0 : public zr::Strategy<Zero0> {
 public:
  static constexpr zr_key keys[] = {zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15,
                                                  "gradients travel in buckets of this size, two at a time")};
  explicit Zero0(const zr::Config& config) : bucket_bytes_(config.integer("bucket_bytes")) {}

  void plan(const zr_plan_in& in, zr::Plan& plan) const {
    const zr::FlatLayout layout = lay_out(in);
    const uint32_t weights = plan.buffer(ZR_ROLE_WEIGHT, "weights, whole", layout.total(), in.weight_dtype);
    const uint32_t sums = plan.buffer(ZR_ROLE_SUM, "gradient sums, whole", layout.trainable(), in.sum_dtype);
    for (int i = 0; i < kRooms; ++i) plan.buffer(ZR_ROLE_BUCKET, "gradient bucket", largest(layout), in.grad_dtype);
    for (uint32_t p = 0; p < in.n_params; ++p)
      if (in.params[p]->count > 0) plan.piece(ZR_ROLE_WEIGHT, p, weights, 0, in.params[p]->count, layout.offset(p));
    for (uint32_t p = 0; p < in.n_params; ++p)
      if (in.params[p]->count > 0 && !(in.params[p]->flags & ZR_PARAM_FROZEN))
        plan.piece(ZR_ROLE_SUM, p, sums, 0, in.params[p]->count, layout.offset(p));
  }

  void bind(const zr_plan_in& in, const zr::Bound& bound) {
    layout_.emplace(lay_out(in));
    comm_.emplace(bound.comm);
    rank_ = in.rank;
    sums_ = bound.buffers[1];
    for (int i = 0; i < kRooms; ++i) room_[i] = bound.buffers[2 + i];
    for (std::size_t b = 0; b < layout_->buckets().size(); ++b) {
      counts_.push_back(layout_->counts(b));
      label_.push_back("bucket " + std::to_string(b));
    }
    expect_all();
  }

  zr_view grad_place(uint32_t param, int64_t first, uint32_t) {
    const int64_t begin = layout_->offset(param) + first;
    const std::size_t b = layout_->bucket_of(begin);
    if (b >= leaving_ + kRooms) return {};  // its room holds a bucket that is still filling
    left_[b % kRooms].wait();               // ... or one that peers still read
    const auto& bucket = layout_->buckets()[b];
    return zr::part(room_[b % kRooms], begin - bucket.begin,
                    std::min(bucket.end - begin, layout_->count(param) - first));
  }

  void grad_ready(uint32_t param, int64_t first, int64_t count, uint32_t micro) {
    missing_[layout_->bucket_of(layout_->offset(param) + first)] -= count;
    for (; leaving_ < missing_.size() && missing_[leaving_] == 0; ++leaving_) {
      const auto part = layout_->part(leaving_, rank_);
      // The first micro-step folds from +0, so that no sum need be cleared.
      left_[leaving_ % kRooms] =
          comm_->start(zr::reduce_scatter(zr::part(room_[leaving_ % kRooms], 0, layout_->buckets()[leaving_].size()),
                                          zr::part(sums_, part.begin, part.size()), label_[leaving_].c_str(),
                                          micro > 0 ? ZR_COLL_ACCUMULATE : 0, counts_[leaving_].data()));
    }
  }

  void event(uint32_t kind, uint32_t) {
    if (kind != ZR_BACKWARD_END) return;
    for (zr::Done& done : left_) {
      done.wait();
      done = zr::Done();
    }
    expect_all();
  }

  void grads_finish() {
    std::vector<zr::Done> gathers;
    for (std::size_t b = 0; b < counts_.size(); ++b) {
      const auto part = layout_->part(b, rank_);
      const auto& bucket = layout_->buckets()[b];
      gathers.push_back(comm_->start(zr::all_gather(zr::part(sums_, part.begin, part.size()),
                                                    zr::part(sums_, bucket.begin, bucket.size()), label_[b].c_str(),
                                                    counts_[b].data())));
    }
    for (const zr::Done& done : gathers) done.wait();
  }

  void updated() {}  // every rank has updated every weight, from the same sums

 private:
  static constexpr int kRooms = 2;
  zr::FlatLayout lay_out(const zr_plan_in& in) const { return {in, bucket_bytes_ / zr::bytes_of(in.grad_dtype)}; }
  static int64_t largest(const zr::FlatLayout& layout) {
    int64_t elements = 0;
    for (const auto& bucket : layout.buckets()) elements = std::max(elements, bucket.size());
    return elements;
  }
  void expect_all() {
    leaving_ = 0;
    missing_.assign(layout_->buckets().size(), 0);
    // Alignment between parameters is never announced; the sums skip it, so what the rooms hold there does not matter.
    for (std::size_t b = 0; b < missing_.size(); ++b) missing_[b] = layout_->live(layout_->buckets()[b]);
  }

  int64_t bucket_bytes_;
  std::optional<zr::FlatLayout> layout_;
  std::optional<zr::Comm> comm_;
  int32_t rank_ = 0;
  zr_view sums_{};
  zr_view room_[kRooms] = {};
  zr::Done left_[kRooms];                     // the bucket that last left from a room
  std::vector<std::vector<int64_t>> counts_;  // by bucket: every rank's elements
  std::vector<std::string> label_;            // by bucket
  std::vector<int64_t> missing_;              // by bucket: live elements not yet ready in this micro-step
  std::size_t leaving_ = 0;                   // the bucket that leaves next
};

}  // namespace

ZR_STRATEGY(Zero0, "zero0", "zeroth", "1.0.0");
