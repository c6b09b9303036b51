// A strategy that holds the weights of a parameter in two pieces: the host must reject it, because it cannot gather
// them.
#include "zr/strategy.hpp"

namespace {

struct Halves : zr::Strategy<Halves> {
  void plan(const zr_plan_in& in, zr::PlanBuilder& plan) const {
    int64_t all = 0;
    for (uint32_t p = 0; p < in.n_params; ++p) all += zr::round_up(in.params[p]->count, in.align);
    const uint32_t weights = plan.buffer(ZR_ROLE_WEIGHT, "weights", all, in.weight_dtype);
    const uint32_t sums = plan.buffer(ZR_ROLE_REDUCED_GRAD, "sums", all, in.reduced_grad_dtype);
    int64_t at = 0;
    for (uint32_t p = 0; p < in.n_params; at += zr::round_up(in.params[p++]->count, in.align)) {
      const int64_t count = in.params[p]->count, half = count > in.norm_block ? in.norm_block : count;
      plan.piece(ZR_ROLE_WEIGHT, p, weights, 0, half, at);
      if (half < count) plan.piece(ZR_ROLE_WEIGHT, p, weights, half, count - half, at + half);
      if (!(in.params[p]->flags & ZR_PARAM_FROZEN)) plan.piece(ZR_ROLE_REDUCED_GRAD, p, sums, 0, count, at);
    }
  }
  void bind(const zr_plan_in&, const zr::Binding&) {}
  zr_view grad_destination(uint32_t, int64_t&, const zr_use&) { return {}; }
  void grad_ready(uint32_t, int64_t, int64_t, const zr_use&) {}
  void event(uint32_t, const zr_use&) {}
  void grads_finish(const zr_use&) {}
  void updated(const zr_use&) {}
};

}  // namespace

ZR_STRATEGY(Halves, "halves", "test", "1.0.0");
