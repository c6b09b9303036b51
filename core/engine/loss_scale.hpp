// The loss scale of fp16, and how many steps in a row may be skipped: one policy for every strategy and dtype
// (NUMERICS.md 2, 6, 8).
#pragma once

#include <cstdint>

#include "config/config.hpp"

namespace zr::host {

/// The keys of [fp16], and train.max_skipped_steps.
struct LossScaleKeys {
  bool scales = true;  // weights are fp16; else the scale is 1 for ever, and only skips are counted
  double fixed = 0;    // 0: it adjusts itself
  int64_t initial_power = 16, window = 1000, hysteresis = 2;
  bool consecutive_hysteresis = false;
  double least = 1;
  int64_t max_skips = 50;
  /// As the configuration has them.
  static LossScaleKeys of(const JobConfig& config);
};

/// Always a power of two, so that scaling rounds nothing; the same on all ranks, which tell it the same.
class LossScale {
 public:
  explicit LossScale(const LossScaleKeys& keys);
  /// What a checkpoint keeps of it.
  struct State {
    double value;
    int64_t good, hysteresis_left, skips;
    bool dynamic;  // it moves
  };
  State state() const { return {value_, good_, hysteresis_left_, skips_, keys_.scales && keys_.fixed == 0}; }
  /// A scale that the keys fix, or that is 1 for ever, stays; such a one is not taken either.
  void restore(const State& state);

  /// What the coming step's losses are multiplied by.
  double value() const { return value_; }
  /// The coming step's gradients are to be looked at one by one as they leave: the step before was skipped, so that the
  /// next may be the job's last and its report must name the rank.
  bool watches() const { return skips_ > 0 || keys_.max_skips == 1; }
  /// Skipped steps since the last good one.
  int64_t skips_in_a_row() const { return skips_; }
  /// As many as train.max_skipped_steps allows.
  bool gives_up() const { return skips_ >= keys_.max_skips; }

  /// A step was made. Doubles the scale if `window` good steps, or a multiple of that, stand between it and the last
  /// overflow.
  void made();
  /// A step was skipped: gradients were not finite. Halves the scale, down to the least, once `hysteresis` is used up.
  void skipped();

 private:
  LossScaleKeys keys_;
  double value_;
  int64_t good_ = 0;         // steps since the last overflow
  int64_t hysteresis_left_;  // 1: the next overflow halves
  int64_t skips_ = 0;
};

}  // namespace zr::host
