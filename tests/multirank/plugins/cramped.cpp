// A strategy with one bucket, for the gradient of one parameter at a time, from the last to the first. It cannot hold
// gradients over the micro-steps of a step, and does not check whether it must.
#include <algorithm>
#include <optional>

#include "zr/strategy.hpp"

namespace {

class Cramped : public zr::Strategy<Cramped> {
 public:
  void plan(const zr_plan_in& in, zr::PlanBuilder& plan) const {
    int64_t all = 0, largest = 0;
    for (uint32_t p = 0; p < in.n_params; ++p) {
      all += zr::round_up(in.params[p]->count, in.align);
      largest = std::max(largest, in.params[p]->count);
    }
    const uint32_t weights = plan.buffer(ZR_ROLE_WEIGHT, "weights", all, in.weight_dtype);
    const uint32_t sums = plan.buffer(ZR_ROLE_REDUCED_GRAD, "sums", all, in.reduced_grad_dtype);
    plan.buffer(ZR_ROLE_BUCKET, "one gradient", largest, in.grad_dtype);
    for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
      int64_t at = 0;
      for (uint32_t p = 0; p < in.n_params; at += zr::round_up(in.params[p++]->count, in.align))
        if (in.params[p]->count > 0 && (role == ZR_ROLE_WEIGHT || !(in.params[p]->flags & ZR_PARAM_FROZEN)))
          plan.piece(role, p, role == ZR_ROLE_WEIGHT ? weights : sums, 0, in.params[p]->count, at);
    }
  }
  void bind(const zr_plan_in& in, const zr::Binding& bound) {
    comm_.emplace(bound.comm);
    in_ = &in;
    sums_ = bound.buffers[1];
    bucket_ = bound.buffers[2];
    begin();
  }
  zr_view grad_destination(uint32_t param, int64_t first, const zr_use&) {
    if (param != next_) return {};
    return zr::part(bucket_, first, in_->params[param]->count - first);
  }
  void grad_ready(uint32_t param, int64_t, int64_t, const zr_use& use) {
    int64_t at = 0;
    for (uint32_t p = 0; p < param; ++p) at += zr::round_up(in_->params[p]->count, in_->align);
    const int64_t count = in_->params[param]->count;
    comm_->run(zr::all_reduce(zr::part(bucket_, 0, count), zr::part(sums_, at, count), in_->params[param]->name,
                              use.micro > 0 ? ZR_COLL_ACCUMULATE : 0));
    advance();
  }
  void event(uint32_t kind, const zr_use&) {
    if (kind == ZR_BACKWARD_END) begin();
  }
  void grads_finish(const zr_use&) {}
  void updated(const zr_use&) {}

 private:
  void begin() {
    next_ = in_->n_params;
    advance();
  }
  void advance() {
    while (next_-- > 0)
      if (in_->params[next_]->count > 0 && !(in_->params[next_]->flags & ZR_PARAM_FROZEN)) return;
  }
  const zr_plan_in* in_ = nullptr;
  std::optional<zr::Comm> comm_;
  zr_view sums_{}, bucket_{};
  uint32_t next_ = 0;
};

}  // namespace

ZR_STRATEGY(Cramped, "cramped", "test", "1.0.0");
