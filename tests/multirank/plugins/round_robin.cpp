// A strategy outside plugins/ that uses only sdk/: it assigns full parameters round-robin to owners. A reduce gives the
// owner of a parameter its reduced gradient, and a broadcast sends the updated weights.
#include <optional>
#include <string>
#include <vector>

#include "zr/strategy.hpp"

namespace {

class RoundRobin : public zr::Strategy<RoundRobin> {
 public:
  void plan(const zr_plan_in& in, zr::PlanBuilder& plan) const {
    int64_t all = 0, own = 0, trainable = 0;
    const auto owners = owners_of(in);
    for (uint32_t p = 0; p < in.n_params; ++p) {
      all += padded(in, p);
      if (owners[p] >= 0) trainable += padded(in, p);
      if (owners[p] == in.rank) own += padded(in, p);
    }
    const uint32_t weights = plan.buffer(ZR_ROLE_WEIGHT, "weights", all, in.weight_dtype);
    plan.buffer(ZR_ROLE_GRAD, "gradients", trainable, in.grad_dtype);
    const uint32_t sums = plan.buffer(ZR_ROLE_REDUCED_GRAD, "own sums", own, in.reduced_grad_dtype);
    int64_t at = 0, own_at = 0;
    for (uint32_t p = 0; p < in.n_params; at += padded(in, p++)) {
      if (in.params[p]->count == 0) continue;
      plan.piece(ZR_ROLE_WEIGHT, p, weights, 0, in.params[p]->count, at);
      if (owners[p] != in.rank) continue;
      plan.piece(ZR_ROLE_REDUCED_GRAD, p, sums, 0, in.params[p]->count, own_at);
      own_at += padded(in, p);
    }
  }

  void bind(const zr_plan_in& in, const zr::Binding& bound) {
    comm_.emplace(bound.comm);
    const auto owners = owners_of(in);
    int64_t weight = 0, gradient = 0, sum = 0;
    for (uint32_t p = 0; p < in.n_params; ++p) {
      const int64_t count = in.params[p]->count;
      Parameter parameter{in.params[p]->name, owners[p], zr::part(bound.buffers[0], weight, count), {}, {}, count};
      weight += padded(in, p);
      if (owners[p] >= 0) {
        parameter.gradient = zr::part(bound.buffers[1], gradient, count);
        gradient += padded(in, p);
      }
      if (owners[p] == in.rank) {
        parameter.sum = zr::part(bound.buffers[2], sum, count);
        sum += padded(in, p);
      }
      parameters_.push_back(parameter);
    }
  }

  zr_view grad_destination(uint32_t param, int64_t first, const zr_use&) {
    return zr::part(parameters_[param].gradient, first, parameters_[param].count - first);
  }
  void grad_ready(uint32_t, int64_t, int64_t, const zr_use&) {}
  void event(uint32_t kind, const zr_use& use) {
    if (kind != ZR_BACKWARD_END) return;
    for (const Parameter& p : parameters_)
      if (p.owner >= 0 && p.count > 0)
        comm_->run(zr::reduce(p.gradient, p.sum, p.owner, p.name, use.micro > 0 ? ZR_COLL_ACCUMULATE : 0));
  }
  void grads_finish(const zr_use&) {}
  void updated(const zr_use&) {
    for (const Parameter& p : parameters_)
      if (p.owner >= 0 && p.count > 0) comm_->run(zr::broadcast(p.weight, p.owner, p.name));
  }

 private:
  struct Parameter {
    const char* name;
    int32_t owner;
    zr_view weight, gradient, sum;
    int64_t count;
  };
  static int64_t padded(const zr_plan_in& in, uint32_t p) { return zr::round_up(in.params[p]->count, in.align); }
  // The rank that updates each parameter; -1 for frozen ones.
  static std::vector<int32_t> owners_of(const zr_plan_in& in) {
    std::vector<int32_t> owners;
    int32_t next = 0;
    for (uint32_t p = 0; p < in.n_params; ++p) {
      const bool frozen = in.params[p]->flags & ZR_PARAM_FROZEN;
      owners.push_back(frozen ? -1 : next);
      if (!frozen) next = (next + 1) % in.world;
    }
    return owners;
  }

  std::optional<zr::Comm> comm_;
  std::vector<Parameter> parameters_;
};

}  // namespace

ZR_STRATEGY(RoundRobin, "round_robin", "test", "1.0.0");
