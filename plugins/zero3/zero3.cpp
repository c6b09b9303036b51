// ZeRO-3: weights, sums and states are cut over the ranks; a weight is whole only around its uses.
#include <memory>
#include <string>
#include <vector>

#include "cells.hpp"
#include "gathers.hpp"
#include "zr/strategy.hpp"

namespace {

using zero3::Cell;
using zero3::Cells;

class Zero3 : public zr::Strategy<Zero3> {
 public:
  static constexpr zr_key keys[] = {
      zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15,
                    "gradients travel in buckets of this size, two at a time"),
      zr::key_bytes("prefetch_bytes", "\"64MiB\"", 0, 1e15, "weights gathered ahead of their use"),
      zr::key_int("persistence_threshold", "100000", 0, 1e15,
                  "parameters of at most so many elements stay whole on every rank"),
      zr::key_bytes("max_live_bytes", "\"2GiB\"", 0, 1e15,
                    "gathered weights at any time; farther ones are let go for nearer ones"),
      zr::key_bytes("max_reuse_bytes", "\"2GiB\"", 0, 1e15,
                    "a weight used again within so many bytes of weights is not let go between")};
  Zero3(const zr::Config& config, const zr::Host& host)
      : host_(host),
        bucket_bytes_(config.integer("bucket_bytes")),
        persistent_(config.integer("persistence_threshold")),
        limits_{config.integer("prefetch_bytes"), config.integer("max_live_bytes"), config.integer("max_reuse_bytes")} {
  }

  void plan(const zr_plan_in& in, zr::Plan& plan) const {
    const Cells cells = make_cells(in);
    const Layout layout(in, cells);
    const int64_t width = zr::bytes_of(in.weight_dtype);
    plan.buffer(ZR_ROLE_SHARD, "weights, own part", cells.shard(), in.weight_dtype);
    const bool alias = zr::alias_flag(in) != 0;
    plan.buffer(alias ? ZR_ROLE_WEIGHT : ZR_ROLE_WINDOW,
                alias ? "weights, one for all ranks" : "weights that stay whole", cells.persistent(), in.weight_dtype,
                zr::alias_flag(in));
    plan.buffer(ZR_ROLE_WINDOW, "gathered weights", in.world > 1 ? zero3::window_elements(cells, limits_, width) : 0,
                in.weight_dtype);
    const uint32_t gradients = zr::GradientBuckets::plan(in, layout.memory, layout.largest, layout.total, plan);
    const uint32_t sums = layout.in_place
                              ? gradients
                              : plan.buffer(ZR_ROLE_SUM, "gradient sums, own part", layout.own_total, in.sum_dtype);
    for (uint32_t p = 0; p < in.n_params; ++p) {
      if (in.params[p]->count == 0) continue;
      const Cell& cell = cells.all()[cells.cell_of(p)];
      if (cell.persistent) {
        plan.piece(ZR_ROLE_WEIGHT, p, kWhole, 0, in.params[p]->count, cell.own + cells.offset(p));
        continue;
      }
      const zero3::Range part = cell.part(in.rank);
      cells.pieces(cell, part, [&](uint32_t param, int64_t first, int64_t count, int64_t offset) {
        if (param == p)
          plan.piece(in.world > 1 ? ZR_ROLE_SHARD : ZR_ROLE_WEIGHT, p, kShard, first, count,
                     cell.own + offset - part.begin);
      });
    }
    for (const Sum& sum : layout.own) plan.piece(ZR_ROLE_SUM, sum.param, sums, sum.first, sum.count, sum.offset);
  }

  void bind(const zr_plan_in& in, const zr::Bound& bound) {
    cells_ = std::make_unique<Cells>(make_cells(in));
    comm_ = std::make_unique<zr::Comm>(bound.comm);
    whole_ = bound.buffers[kWhole];
    alias_ = zr::alias_flag(in) != 0;
    Layout layout(in, *cells_);
    std::vector<zr_view> sums;
    const zr_view& memory =
        bound.buffers[kGradients + (layout.in_place ? 0 : zr::GradientBuckets::buffers(layout.memory))];
    std::vector<zr::GradientBucket> buckets;
    for (size_t b = 0; b < cells_->buckets(); ++b) {
      buckets.push_back(cells_->bucket(b));
      sums.push_back(zr::part(memory, layout.place[b], buckets[b].counts[static_cast<size_t>(in.rank)]));
    }
    gradients_ = std::make_unique<zr::GradientBuckets>(in, layout.memory, std::move(buckets), *comm_,
                                                       bound.buffers + kGradients, std::move(sums));
    gathers_ = std::make_unique<zero3::Gathers>(in, *cells_, limits_, *comm_, bound.buffers[kShard],
                                                bound.buffers[kWindow], host_);
  }

  zr_view grad_place(uint32_t param, int64_t& first, uint32_t) { return gradients_->place(param, first); }
  void grad_ready(uint32_t param, int64_t first, int64_t count, uint32_t micro) {
    gradients_->ready(param, first, count, micro);
  }

  void event(uint32_t kind, uint32_t) {
    if (kind != ZR_BACKWARD_END) return;
    gradients_->backward_end();
    gathers_->pass_end();
  }

  void grads_finish() { gathers_->wait(); }  // peers have what they read of this rank's shard

  void updated() {
    gathers_->refresh();
    if (alias_) return comm_->run(zr::barrier("weights"));  // everybody has what everybody wrote
    std::vector<zr::Done> coming;
    for (const Cell& cell : cells_->all()) {
      if (!cell.persistent || cell.frozen) continue;
      const zero3::Range part = cell.part(comm_->rank());
      std::vector<int64_t> counts;
      for (int32_t r = 0; r < comm_->world(); ++r) counts.push_back(cell.part(r).size());
      coming.push_back(comm_->start(zr::all_gather(zr::part(whole_, cell.own + part.begin, part.size()),
                                                   zr::part(whole_, cell.own, cell.size), "weights that stay whole",
                                                   counts.data())));
    }
    for (const zr::Done& done : coming) done.wait();
    gathers_->prefetch();
  }

  void acquire(const uint32_t* params, uint32_t n, uint32_t phase, zr_view* whole) {
    gathers_->acquire(params, n, phase, whole);
  }
  void release(const uint32_t* params, uint32_t n, uint32_t) { gathers_->release(params, n); }

 private:
  enum : uint32_t { kShard, kWhole, kWindow, kGradients };  // the plan's buffers
  struct Sum {
    uint32_t param;
    int64_t first, count, offset;
  };
  // Gradient buckets, and where this rank's sums stand.
  struct Layout {
    Layout(const zr_plan_in& in, const Cells& cells)
        : memory(zr::gradient_memory(in, zr::GradientMemory::rooms)), in_place(zr::gradients_are_sums(in, memory)) {
      std::vector<std::vector<zr::GradientBucket::Run>> runs(cells.buckets());
      for (size_t b = 0; b < runs.size(); ++b) {
        largest = std::max(largest, cells.bucket_size(b));
        total += cells.bucket_size(b);
        place.push_back(own_total);
        own_total += cells.own(b, runs[b]);
      }
      if (in_place) {  // in the whole buffer buckets stand from the last to the first
        int64_t base = total;
        for (size_t b = 0; b < runs.size(); ++b) {
          base -= cells.bucket_size(b);
          place[b] = base + cells.before_own(b);
        }
      }
      for (size_t b = 0; b < runs.size(); ++b)
        for (const auto& run : runs[b]) own.push_back({run.param, run.first, run.count, place[b] + run.offset});
      std::sort(own.begin(), own.end(),
                [](const Sum& a, const Sum& b) { return std::pair(a.param, a.first) < std::pair(b.param, b.first); });
    }
    zr::GradientMemory memory;
    bool in_place;
    std::vector<int64_t> place;  // by bucket: of this rank's sums
    std::vector<Sum> own;        // by parameter, ascending
    int64_t largest = 0, total = 0, own_total = 0;
  };
  Cells make_cells(const zr_plan_in& in) const {
    return {in, bucket_bytes_ / zr::bytes_of(in.grad_dtype), zr::alias_flag(in) ? INT64_MAX : persistent_};
  }

  zr::Host host_;
  int64_t bucket_bytes_, persistent_;
  zero3::Limits limits_;
  std::unique_ptr<Cells> cells_;
  std::unique_ptr<zr::Comm> comm_;
  zr_view whole_{};
  bool alias_ = false;  // weights are whole, once for all ranks: nothing is gathered
  std::unique_ptr<zr::GradientBuckets> gradients_;
  std::unique_ptr<zero3::Gathers> gathers_;
};

}  // namespace

ZR_STRATEGY(Zero3, "zero3", "zeroth", "1.0.0");
