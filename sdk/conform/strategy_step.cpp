#include "conform/strategy_step.hpp"

#include <algorithm>
#include <functional>

namespace zr::conform {

void StrategyStep::reduce_gradients() {
  for (micro_ = 0; micro_ < shape_.accumulation; ++micro_) {
    const zr_use forward = use_of(ZR_FORWARD), backward = use_of(ZR_BACKWARD);
    zr_use of_gradients = backward;
    if (is_last_micro()) of_gradients.flags |= ZR_USE_LAST_MICRO;
    if (shape_.has_local_grads) of_gradients.flags |= ZR_USE_LOCAL_GRADS;
    use_weights(forward);
    if (micro_ == 0) step_begin(of_gradients);
    use_weights(backward);
    delivered_.assign(shape_.params.size(), 0);
    for (uint32_t part = 0; part < shape_.parts; ++part) {
      if (!shape_.has_local_grads) deliver_part(part, of_gradients);
      if (!shape_.holds || is_last_micro()) backward_end(part, of_gradients);
    }
  }
  grads_finish(update_use());
}

zr_use StrategyStep::use_of(uint32_t phase) const {
  const bool in_micro_step = phase != ZR_UPDATE_PHASE;
  const bool is_local = shape_.has_local_grads && !in_micro_step;
  return {sizeof(zr_use),
          phase,
          in_micro_step && !shape_.holds ? static_cast<uint32_t>(micro_) : 0,
          is_local ? uint32_t{ZR_USE_LOCAL_GRADS} : 0,
          nullptr,
          nullptr};
}

std::vector<uint32_t> StrategyStep::gradient_order(uint32_t part) const {
  std::vector<uint32_t> order;  // backward computes the last parameter's gradient first
  for (auto param = static_cast<uint32_t>(shape_.params.size()); param-- > 0;)
    if (!shape_.params[param].frozen && shape_.params[param].part == part) order.push_back(param);
  return order;
}

void StrategyStep::write_gradient(uint32_t, int64_t, const zr_view&) {}

void StrategyStep::deliver_part(uint32_t part, const zr_use& use) {
  pending_.clear();
  for (const uint32_t param : gradient_order(part)) {
    if (!deliver(param, use)) pending_.push_back(param);
    deliver_pending(use);
  }
  std::sort(pending_.begin(), pending_.end(), std::greater<>());
  deliver_pending(use);
  if (!pending_.empty())
    fail_destination("has no free bucket slot for " + text_of(pending_[0]) + " although no bucket is being filled");
}

bool StrategyStep::deliver(uint32_t param, const zr_use& use) {
  const int64_t count = shape_.params[param].count;
  int64_t& delivered = delivered_[param];
  while (delivered < count) {
    zr_view dst{};
    int64_t first = delivered;
    if (grad_destination(param, &first, use, &dst) == ZR_AGAIN) return false;
    if (dst.count <= 0 || first < 0 || dst.count > count - delivered || dst.count > count - first)
      fail_destination("returned an invalid destination for " + text_of(param) + ": " + std::to_string(dst.count) +
                       " elements from element " + std::to_string(first));
    write_gradient(param, first, dst);
    if (!shape_.holds || is_last_micro()) grad_ready(param, first, dst.count, use);
    delivered += dst.count;
  }
  return true;
}

void StrategyStep::deliver_pending(const zr_use& use) {
  for (bool progresses = true; progresses && !pending_.empty();) {
    progresses = false;
    std::erase_if(pending_, [&](uint32_t param) {
      const int64_t before = delivered_[param];
      const bool is_complete = deliver(param, use);
      progresses |= is_complete || delivered_[param] != before;
      return is_complete;
    });
  }
}

}  // namespace zr::conform
