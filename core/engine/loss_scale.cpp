#include "engine/loss_scale.hpp"

#include <algorithm>
#include <cmath>

#include "base/limits.hpp"

namespace zr::host::engine {

LossScaleKeys LossScaleKeys::of(const config::JobConfig& config) {
  const config::Fp16Config& fp16 = config.fp16();
  LossScaleKeys keys;
  keys.scales = config.precision().weights == ZR_F16;
  keys.fixed = fp16.loss_scale;
  keys.initial_power = fp16.initial_scale_power;
  keys.window = fp16.loss_scale_window;
  keys.hysteresis = fp16.hysteresis;
  keys.consecutive_hysteresis = fp16.consecutive_hysteresis;
  keys.least = fp16.min_loss_scale;
  keys.max_skips = config.train().max_skipped_steps;
  return keys;
}

LossScale::LossScale(const LossScaleKeys& keys)
    : keys_(keys),
      value_(!keys.scales      ? 1
             : keys.fixed != 0 ? keys.fixed
                               : std::exp2(keys.initial_power)),
      hysteresis_left_(keys.hysteresis) {}

void LossScale::restore(const State& state) {
  skips_ = state.skips;
  if (!keys_.scales || keys_.fixed != 0 || !state.dynamic) return;
  value_ = state.value;
  good_ = state.good;
  hysteresis_left_ = state.hysteresis_left;
}

void LossScale::made() {
  skips_ = 0;
  if (!keys_.scales || keys_.fixed != 0) return;
  const bool doubles = good_ > 0 && good_ % keys_.window == 0;
  if (doubles) value_ = std::min(2 * value_, kMaxLossScale);
  if (doubles || keys_.consecutive_hysteresis) hysteresis_left_ = keys_.hysteresis;
  ++good_;
}

void LossScale::skipped() {
  ++skips_;
  if (!keys_.scales || keys_.fixed != 0) return;
  good_ = 0;
  if (hysteresis_left_ > 1) {
    --hysteresis_left_;
  } else {
    value_ = std::max(value_ / 2, keys_.least);
  }
}

}  // namespace zr::host::engine
