// The loss scale of fp16, and the limit of consecutive skipped steps: one policy for every strategy and dtype
// (docs/numerics.md, sections 2, 6 and 8).
#pragma once

#include <cstdint>

#include "config/config.hpp"

namespace zr::host::engine {

/// Values of the keys in [fp16], and of train.max_skipped_steps.
struct LossScaleKeys {
  bool enabled = true;  // weights are fp16; false: the scale is always 1, and only skips are counted
  double fixed = 0;     // static scale; 0: dynamic
  int64_t initial_power = 16, window = 1000, hysteresis = 2;
  bool consecutive_hysteresis = false;
  double minimum = 1;
  int64_t max_skips = 50;
  /// Reads them from the configuration.
  static LossScaleKeys of(const config::JobConfig& config);
};

/// The scale is always a power of two, so that scaling does not round. It is the same on all ranks, because all ranks
/// call the same methods.
class LossScale {
 public:
  explicit LossScale(const LossScaleKeys& keys);
  /// The part that a checkpoint saves.
  struct State {
    double value;
    int64_t good, hysteresis_left, skips;
    bool dynamic;  // the scale can change
  };
  State state() const {
    return {value_, steps_since_overflow_, hysteresis_left_, skips_, keys_.enabled && keys_.fixed == 0};
  }
  /// Restores the skip count; restores the scale only if both this scale and the saved one are dynamic.
  void restore(const State& state);

  /// The factor for the losses of the next step.
  double value() const { return value_; }
  /// True if the next step must check each gradient as it is handed over: the previous step was skipped, so the next
  /// one may be the job's last, and its error must name the rank. Also true if one skipped step ends the job.
  bool checks_gradients() const { return skips_ > 0 || keys_.max_skips == 1; }
  /// Skipped steps since the last applied one.
  int64_t skips_in_a_row() const { return skips_; }
  /// True if the limit of train.max_skipped_steps is reached, so the job ends.
  bool skip_limit_reached() const { return skips_ >= keys_.max_skips; }

  /// Call after an applied step. Doubles the scale if the number of applied steps between it and the last overflow is a
  /// multiple of `window`, above 0.
  void step_applied();
  /// Call after a step that was skipped because gradients were not finite. Halves the scale, down to `minimum`, once
  /// `hysteresis` is used up.
  void step_skipped();

 private:
  LossScaleKeys keys_;
  double value_;
  int64_t steps_since_overflow_ = 0;
  int64_t hysteresis_left_;  // 1: the next overflow halves the scale
  int64_t skips_ = 0;
};

}  // namespace zr::host::engine
