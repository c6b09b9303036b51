// ZeRO-3: weights, reduced gradients and optimizer states are sharded over the ranks; a rank holds a full weight only
// around its uses.
#include <memory>
#include <string>
#include <vector>

#include "gather_groups.hpp"
#include "gather_scheduler.hpp"
#include "zr/strategy.hpp"

namespace {

using zero3::GatherGroup;
using zero3::GatherGroups;

class Zero3 : public zr::Strategy<Zero3> {
 public:
  static constexpr const char* description = "ZeRO stage 3: optimizer states, gradients and weights are sharded";
  static constexpr const char* license = "Apache-2.0";
  static constexpr uint32_t flags = ZR_STRATEGY_STREAMS;
  static constexpr uint64_t device_types = zr::kAnyDevice;
  static constexpr zr_key keys[] = {
      zr::key_bytes("bucket_bytes", "\"16MiB\"", 65536, 1e15,
                    "size of a gradient bucket; two buckets are in use at a time"),
      zr::key_bytes("prefetch_bytes", "\"64MiB\"", 0, 1e15, "most bytes of weights gathered ahead of their use"),
      zr::key_int("persistence_threshold", "100000", 0, 1e15,
                  "parameters of at most this many elements stay unsharded on every rank"),
      zr::key_bytes("max_live_bytes", "\"2GiB\"", 0, 1e15,
                    "most bytes of gathered weights; weights with a farther next use are released first"),
      zr::key_bytes("max_reuse_bytes", "\"2GiB\"", 0, 1e15,
                    "a weight stays gathered if its next use is within this many bytes of weights"),
      zr::key_text("shard_within", "\"job\"", "job|host",
                   "\"host\": each host has all weights, which only its ranks share")};
  Zero3(const zr::Config& config, const zr::Host& host)
      : host_(host),
        bucket_bytes_(config.integer("bucket_bytes")),
        persistent_(config.integer("persistence_threshold")),
        limits_{config.integer("prefetch_bytes"), config.integer("max_live_bytes"), config.integer("max_reuse_bytes")},
        within_host_(config.text("shard_within") == "host") {}

  void plan(const zr_plan_in& in, zr::PlanBuilder& plan) const {
    if (within_host_ && zr::several_hosts(in) && !shares_weights(in)) {
      const std::string obstacle = zr::sharing_obstacle(in);
      throw zr::PluginError(
          ZR_INVALID, "strategy.zero3.shard_within = \"host\" needs weights that the ranks of a host share, but " +
                          (obstacle.empty() ? "they do not" : obstacle) + "; change that, or remove the key");
    }
    const GatherGroups groups = make_groups(in);
    const Layout layout(in, groups);
    const int64_t width = zr::bytes_of(in.weight_dtype);
    plan.buffer(ZR_ROLE_WEIGHT_SHARD, "weights, own shard", groups.shard(), in.weight_dtype);
    const bool shared = shares_weights(in);
    plan.buffer(shared ? ZR_ROLE_WEIGHT : ZR_ROLE_ALL_GATHER, shared ? zr::weights_tag(in) : "persistent weights",
                groups.persistent(), in.weight_dtype, shared ? ZR_BUFFER_SHARED : 0);
    plan.buffer(ZR_ROLE_ALL_GATHER, "gathered weights",
                in.world > 1 ? zero3::all_gather_buffer_elements(groups, limits_, width) : 0, in.weight_dtype);
    const uint32_t gradients = zr::GradientBuckets::plan(in, layout.memory, layout.largest, layout.total, plan);
    const uint32_t reduced_gradients = layout.in_place
                                           ? gradients
                                           : plan.buffer(ZR_ROLE_REDUCED_GRAD, "reduced gradients, own shard",
                                                         layout.own_total, in.reduced_grad_dtype);
    for (uint32_t p = 0; p < in.n_params; ++p) {
      if (in.params[p]->count == 0) continue;
      const GatherGroup& group = groups.groups()[groups.group_of(p)];
      if (group.persistent) {
        plan.piece(ZR_ROLE_WEIGHT, p, kPersistent, 0, in.params[p]->count, group.own_offset + groups.offset(p));
        continue;
      }
      const zero3::GroupRange part = group.part(in.rank);
      groups.pieces(group, part, [&](uint32_t param, int64_t first, int64_t count, int64_t offset) {
        if (param == p)
          plan.piece(in.world > 1 ? ZR_ROLE_WEIGHT_SHARD : ZR_ROLE_WEIGHT, p, kShard, first, count,
                     group.own_offset + offset - part.begin);
      });
    }
    for (const ReducedRange& range : layout.own_ranges)
      plan.piece(ZR_ROLE_REDUCED_GRAD, range.param, reduced_gradients, range.first, range.count, range.offset);
  }

  void bind(const zr_plan_in& in, const zr::Binding& bound) {
    groups_ = std::make_unique<GatherGroups>(make_groups(in));
    comm_ = std::make_unique<zr::Comm>(bound.comm);
    persistent_weights_ = bound.buffers[kPersistent];
    shared_weights_ = shares_weights(in);
    several_hosts_ = zr::several_hosts(in);
    Layout layout(in, *groups_);
    std::vector<zr_view> reduced_gradients;
    const zr_view& memory =
        bound.buffers[kGradients + (layout.in_place ? 0 : zr::GradientBuckets::buffers(layout.memory))];
    std::vector<zr::GradientBucket> buckets;
    for (size_t b = 0; b < groups_->buckets(); ++b) {
      buckets.push_back(groups_->bucket(b));
      reduced_gradients.push_back(zr::part(memory, layout.offset[b], buckets[b].counts[static_cast<size_t>(in.rank)]));
    }
    gradients_ = std::make_unique<zr::GradientBuckets>(in, layout.memory, std::move(buckets), *comm_,
                                                       bound.buffers + kGradients, std::move(reduced_gradients));
    scheduler_ = std::make_unique<zero3::GatherScheduler>(in, *groups_, limits_, *comm_, bound.buffers[kShard],
                                                          bound.buffers[kAllGatherBuffer], host_);
  }

  zr_view grad_destination(uint32_t param, int64_t& first, const zr_use&) {
    return gradients_->destination(param, first);
  }
  void grad_ready(uint32_t param, int64_t first, int64_t count, const zr_use& use) {
    gradients_->ready(param, first, count, use.micro);
  }

  void event(uint32_t kind, const zr_use&) {
    if (kind != ZR_BACKWARD_END) return;
    gradients_->backward_end();
    scheduler_->pass_end();
  }

  void grads_finish(const zr_use&) { scheduler_->wait(); }  // peers have finished reading this rank's shard

  void updated(const zr_use&) {
    scheduler_->refresh();
    if (shared_weights_ && !several_hosts_) return comm_->run(zr::barrier("weights"));  // all ranks have written
    std::vector<zr::Done> gathers;
    for (const GatherGroup& group : groups_->groups()) {
      if (!group.persistent || group.frozen) continue;
      const zero3::GroupRange part = group.part(comm_->rank());
      std::vector<int64_t> counts;
      for (int32_t r = 0; r < comm_->world(); ++r) counts.push_back(group.part(r).size());
      gathers.push_back(
          comm_->start(zr::all_gather(zr::part(persistent_weights_, group.own_offset + part.begin, part.size()),
                                      zr::part(persistent_weights_, group.own_offset, group.size), "persistent weights",
                                      counts.data(), shared_weights_ ? ZR_COLL_SHARED : 0)));
    }
    for (const zr::Done& done : gathers) done.wait();
    scheduler_->prefetch();
  }

  void acquire(const uint32_t* params, uint32_t n, const zr_use& use, zr_view* full) {
    scheduler_->acquire(params, n, use.phase, full);
  }
  void release(const uint32_t* params, uint32_t n, const zr_use&) { scheduler_->release(params, n); }

 private:
  enum : uint32_t { kShard, kPersistent, kAllGatherBuffer, kGradients };  // the plan's buffers
  struct ReducedRange {
    uint32_t param;
    int64_t first, count, offset;
  };
  // The gradient buckets, and where this rank's reduced gradients are stored.
  struct Layout {
    Layout(const zr_plan_in& in, const GatherGroups& groups)
        : memory(zr::gradient_memory(in, zr::GradientMemory::double_buffered)),
          in_place(zr::reduces_in_place(in, memory)) {
      std::vector<std::vector<zr::GradientBucket::ParamRange>> ranges(groups.buckets());
      for (size_t b = 0; b < ranges.size(); ++b) {
        largest = std::max(largest, groups.bucket_size(b));
        total += groups.bucket_size(b);
        offset.push_back(own_total);
        own_total += groups.own_part(b, ranges[b]);
      }
      if (in_place) {  // the unsharded gradient buffer stores buckets from the last to the first
        int64_t base = total;
        for (size_t b = 0; b < ranges.size(); ++b) {
          base -= groups.bucket_size(b);
          offset[b] = base + groups.before_own(b);
        }
      }
      for (size_t b = 0; b < ranges.size(); ++b)
        for (const auto& range : ranges[b])
          own_ranges.push_back({range.param, range.first, range.count, offset[b] + range.offset});
      std::sort(own_ranges.begin(), own_ranges.end(), [](const ReducedRange& a, const ReducedRange& b) {
        return std::pair(a.param, a.first) < std::pair(b.param, b.first);
      });
    }
    zr::GradientMemory memory;
    bool in_place;
    std::vector<int64_t> offset;           // by bucket: of this rank's reduced gradients
    std::vector<ReducedRange> own_ranges;  // by parameter, ascending
    int64_t largest = 0, total = 0, own_total = 0;
  };
  GatherGroups make_groups(const zr_plan_in& in) const {
    return {in, bucket_bytes_ / zr::bytes_of(in.grad_dtype), shares_weights(in) ? INT64_MAX : persistent_};
  }
  // One copy of all weights on a host; on several hosts only if the user has the memory for that.
  bool shares_weights(const zr_plan_in& in) const {
    return zr::shared_weights_flag(in) && (within_host_ || !zr::several_hosts(in));
  }

  zr::Host host_;
  int64_t bucket_bytes_, persistent_;
  zero3::Limits limits_;
  bool within_host_;
  std::unique_ptr<GatherGroups> groups_;
  std::unique_ptr<zr::Comm> comm_;
  zr_view persistent_weights_{};
  // The ranks of a host share one unsharded copy of the weights: nothing is gathered for operators.
  bool shared_weights_ = false, several_hosts_ = false;
  std::unique_ptr<zr::GradientBuckets> gradients_;
  std::unique_ptr<zero3::GatherScheduler> scheduler_;
};

}  // namespace

ZR_STRATEGY(Zero3, "zero3", "zeroth", "1.0.0");
