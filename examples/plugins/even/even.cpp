// Even: every rank holds everything, and one all-reduce after each backward sums all gradients.
#include <optional>

#include "zr/strategy.hpp"

namespace {

struct Even : zr::Strategy<Even> {
  void plan(const zr_plan_in& in, zr::PlanBuilder& plan) const {
    const uint32_t weights = plan.buffer(ZR_ROLE_WEIGHT, "weights", offsets(in, true).back(), in.weight_dtype);
    const int64_t trainable = offsets(in, false).back();
    plan.buffer(ZR_ROLE_GRAD, "gradients", trainable, in.grad_dtype);
    const uint32_t sums = plan.buffer(ZR_ROLE_REDUCED_GRAD, "reduced gradients", trainable, in.reduced_grad_dtype);
    place(in, plan, ZR_ROLE_WEIGHT, weights);
    place(in, plan, ZR_ROLE_REDUCED_GRAD, sums);
  }

  void bind(const zr_plan_in& in, const zr::Binding& bound) {
    gradients_ = bound.buffers[1];
    sums_ = bound.buffers[2];
    offsets_ = offsets(in, false);
    comm_.emplace(bound.comm);
    in_ = &in;
  }

  zr_view grad_destination(uint32_t param, int64_t& first, const zr_use&) {
    return zr::part(gradients_, offsets_[param] + first, in_->params[param]->count - first);
  }
  void grad_ready(uint32_t, int64_t, int64_t, const zr_use&) {}
  void event(uint32_t kind, const zr_use& use) {
    if (kind != ZR_BACKWARD_END) return;
    comm_->run(zr::all_reduce(gradients_, sums_, "all gradients",
                              ZR_COLL_GRADIENTS | (use.micro > 0 ? uint32_t{ZR_COLL_ACCUMULATE} : 0u)));
  }
  void grads_finish(const zr_use&) {}
  void updated(const zr_use&) {}

 private:
  static bool counts(const zr_plan_in& in, uint32_t param, bool frozen_too) {
    return frozen_too || !(in.params[param]->flags & ZR_PARAM_FROZEN);
  }
  // Where each parameter begins in a buffer of all, or of the trainable, parameters; and the length of the buffer.
  static std::vector<int64_t> offsets(const zr_plan_in& in, bool frozen_too) {
    std::vector<int64_t> at{0};
    for (uint32_t p = 0; p < in.n_params; ++p)
      at.push_back(at.back() + (counts(in, p, frozen_too) ? zr::round_up(in.params[p]->count, in.align) : 0));
    return at;
  }
  static void place(const zr_plan_in& in, zr::PlanBuilder& plan, uint32_t role, uint32_t buffer) {
    const bool frozen_too = role == ZR_ROLE_WEIGHT;
    const std::vector<int64_t> at = offsets(in, frozen_too);
    for (uint32_t p = 0; p < in.n_params; ++p)
      if (counts(in, p, frozen_too) && in.params[p]->count > 0)
        plan.piece(role, p, buffer, 0, in.params[p]->count, at[p]);
  }

  std::optional<zr::Comm> comm_;
  const zr_plan_in* in_ = nullptr;
  std::vector<int64_t> offsets_;
  zr_view gradients_{}, sums_{};
};

}  // namespace

ZR_STRATEGY(Even, "even", "example", "1.0.0");
