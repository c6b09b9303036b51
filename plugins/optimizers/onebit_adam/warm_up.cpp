#include "warm_up.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "zr/base.hpp"

namespace onebit {

namespace {

constexpr double kStable = 0.96;  // smallest ratio of two sums

// The same on every machine, unlike std::pow().
double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent /= 2, base *= base)
    if (exponent % 2) result *= base;
  return result;
}

}  // namespace

WarmUp::WarmUp(int64_t freeze_step, double beta2)
    : freeze_step_(freeze_step), beta2_(beta2), interval_(std::max<int64_t>(std::llround(1 / (1 - beta2)), 1)) {}

bool WarmUp::begin_step(int64_t step, const zr_param_updates& updates) {
  updates_.assign(updates.all, updates.all + updates.n);
  compressed_.assign(updates.local, updates.local + updates.n);
  most_ = 0;
  for (uint32_t i = 0; i < updates.n; ++i) most_ = std::max(most_, updates_[i] - compressed_[i]);
  if (freeze_step_ > 0) {
    if (step > freeze_step_ && most_ == 0) {
      const std::string before = std::to_string(step - 1);
      throw zr::PluginError(
          ZR_INVALID, "update " + std::to_string(step) +
                          " is after the warm-up (freeze_step = " + std::to_string(freeze_step_) +
                          "), but the optimizer states of all parameters are new, because the checkpoint has none of "
                          "this optimizer or only its weights were loaded; set optimizer.onebit_adam.freeze_step to " +
                          before + " + the number of updates of a new warm-up, or to 0");
    }
    return step > freeze_step_;
  }
  if (most_ == 0) {
    end_ = 0;  // a new warm-up, if there was one before
  } else if (end_ == 0 && std::any_of(compressed_.begin(), compressed_.end(), [](int64_t n) { return n > 0; })) {
    end_ = step - 1;  // a resumed job, whose warm-up had another end
  }
  return end_ > 0;
}

bool WarmUp::needs_sum() const { return freeze_step_ == 0 && end_ == 0 && (most_ + 1) % interval_ == 0; }

bool WarmUp::sum(int64_t step, double sum) {
  const int64_t updates = most_ + 1;
  const double corrected = sum / (1 - power(beta2_, updates));
  const bool follows = last_updates_ > 0 && updates == last_updates_ + interval_;
  const double low = std::min(corrected, last_), high = std::max(corrected, last_);
  const bool finite = std::isfinite(corrected);
  const bool stable = finite && follows && low > 0 && low >= kStable * high;
  change_ = corrected / last_ - 1;
  last_updates_ = finite ? updates : 0;
  last_ = corrected;
  if (stable) end_ = step;
  return stable;
}

void WarmUp::restore(const Saved& saved) {
  end_ = saved.end;
  last_updates_ = saved.updates;
  last_ = saved.corrected;
}

}  // namespace onebit
