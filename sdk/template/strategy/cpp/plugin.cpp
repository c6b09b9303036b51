// The strategy "@ID@": every rank holds all weights, gradients and optimizer states, and one all-reduce after each
// backward sums the gradients of all parameters.
#include <optional>

#include "zr/strategy.hpp"

namespace {

class Plugin : public zr::Strategy<Plugin> {
 public:
  static constexpr const char* description = "every rank has all weights, gradients and optimizer states";
  // Pure: the host also asks for plans of other ranks and worlds. First all buffers, then the pieces of each role.
  void plan(const zr_plan_in& in, zr::PlanBuilder& plan) const {
    const Layout all(in, true), trainable(in, false);
    const uint32_t weights = plan.buffer(ZR_ROLE_WEIGHT, "weights", all.elements, in.weight_dtype);
    plan.buffer(ZR_ROLE_GRAD, "gradients", trainable.elements, in.grad_dtype);
    const uint32_t sums =
        plan.buffer(ZR_ROLE_REDUCED_GRAD, "reduced gradients", trainable.elements, in.reduced_grad_dtype);
    all.emit(in, plan, ZR_ROLE_WEIGHT, weights);
    trainable.emit(in, plan, ZR_ROLE_REDUCED_GRAD, sums);
  }

  void bind(const zr_plan_in& in, const zr::Binding& bound) {
    in_ = &in;
    trainable_ = Layout(in, false);
    gradients_ = bound.buffers[1];
    sums_ = bound.buffers[2];
    comm_.emplace(bound.comm);
  }

  // Where autograd writes the gradient of a parameter, from element `first` on.
  zr_view grad_destination(uint32_t param, int64_t& first, const zr_use&) {
    return zr::part(gradients_, trainable_.begin[param] + first, in_->params[param]->count - first);
  }
  void grad_ready(uint32_t, int64_t, int64_t, const zr_use&) {}

  // Adds the gradients of this backward to the sums; the first micro-step of a step begins them.
  void event(uint32_t kind, const zr_use& use) {
    if (kind != ZR_BACKWARD_END || gradients_.count == 0) return;
    comm_->run(zr::all_reduce(gradients_, sums_, "all gradients",
                              ZR_COLL_GRADIENTS | (use.micro > 0 ? uint32_t{ZR_COLL_ACCUMULATE} : 0u)));
  }
  void grads_finish(const zr_use&) {}
  void updated(const zr_use&) {}  // every rank has updated all weights

 private:
  // Where each parameter begins in a buffer of all, or only of the trainable, parameters.
  struct Layout {
    Layout() = default;
    Layout(const zr_plan_in& in, bool frozen_too) {
      for (uint32_t p = 0; p < in.n_params; ++p) {
        const bool has_place = frozen_too || !(in.params[p]->flags & ZR_PARAM_FROZEN);
        begin.push_back(has_place ? elements : -1);
        if (has_place) elements += zr::round_up(in.params[p]->count, in.align);
      }
    }
    // A parameter without elements has no piece.
    void emit(const zr_plan_in& in, zr::PlanBuilder& plan, uint32_t role, uint32_t buffer) const {
      for (uint32_t p = 0; p < in.n_params; ++p)
        if (begin[p] >= 0 && in.params[p]->count > 0) plan.piece(role, p, buffer, 0, in.params[p]->count, begin[p]);
    }
    std::vector<int64_t> begin;  // -1: not in the buffer
    int64_t elements = 0;
  };

  const zr_plan_in* in_ = nullptr;
  Layout trainable_;
  zr_view gradients_{}, sums_{};
  std::optional<zr::Comm> comm_;
};

}  // namespace

ZR_STRATEGY(Plugin, "@ID@", "@VENDOR@", "0.1.0");
