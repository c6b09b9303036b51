#include "engine/loss_scale.hpp"

#include <algorithm>
#include <cmath>

#include "base/limits.hpp"

namespace zr::host::engine {

LossScaleKeys LossScaleKeys::of(const config::JobConfig& config) {
  const config::Fp16Config& fp16 = config.fp16();
  LossScaleKeys keys;
  keys.enabled = config.precision().weights == ZR_F16;
  keys.fixed = fp16.loss_scale;
  keys.initial_power = fp16.initial_scale_power;
  keys.window = fp16.loss_scale_window;
  keys.hysteresis = fp16.hysteresis;
  keys.consecutive_hysteresis = fp16.consecutive_hysteresis;
  keys.minimum = fp16.min_loss_scale;
  keys.max_skips = config.train().max_skipped_steps;
  return keys;
}

LossScale::LossScale(const LossScaleKeys& keys)
    : keys_(keys),
      value_(!keys.enabled     ? 1
             : keys.fixed != 0 ? keys.fixed
                               : std::exp2(keys.initial_power)),
      hysteresis_left_(keys.hysteresis) {}

void LossScale::restore(const State& state) {
  skips_ = state.skips;
  if (!keys_.enabled || keys_.fixed != 0 || !state.dynamic) return;
  value_ = state.value;
  steps_since_overflow_ = state.good;
  hysteresis_left_ = state.hysteresis_left;
}

void LossScale::step_applied() {
  skips_ = 0;
  if (!keys_.enabled || keys_.fixed != 0) return;
  const bool doubles = steps_since_overflow_ > 0 && steps_since_overflow_ % keys_.window == 0;
  if (doubles) value_ = std::min(2 * value_, kMaxLossScale);
  if (doubles || keys_.consecutive_hysteresis) hysteresis_left_ = keys_.hysteresis;
  ++steps_since_overflow_;
}

void LossScale::step_skipped() {
  ++skips_;
  if (!keys_.enabled || keys_.fixed != 0) return;
  steps_since_overflow_ = 0;
  if (hysteresis_left_ > 1) {
    --hysteresis_left_;
  } else {
    value_ = std::max(value_ / 2, keys_.minimum);
  }
}

}  // namespace zr::host::engine
