// The warm-up of 1-bit Adam: when it ends, and what the second moments then contain.
#pragma once

#include <cstdint>
#include <vector>

#include "zr/abi/draft/local_gradients.h"

namespace onebit {

/// Decides when the warm-up ends; all ranks decide the same. begin_step() and sum() are called between updates, the
/// const methods also during an update.
class WarmUp {
 public:
  /// freeze_step: the last update of the warm-up; 0: the first at which the variance is stable. beta2: of group 0.
  WarmUp(int64_t freeze_step, double beta2);

  /// Whether a step is after the warm-up, as far as is known before training.
  bool may_end_before(int64_t step) const { return freeze_step_ == 0 || step > freeze_step_; }
  /// Whether the step that begins now is after the warm-up. Throws zr::PluginError if it is, and no parameter has a
  /// second moment.
  bool begin_step(int64_t step, const zr_param_updates& updates);
  /// The last update of the warm-up; 0: not known yet.
  int64_t end() const { return freeze_step_ > 0 ? freeze_step_ : end_; }
  /// Whether this step's update is the parameter's first one.
  bool is_first_update(uint32_t param) const { return param < updates_.size() && updates_[param] == 0; }
  /// The parameter's updates before this step that did not change its second moment.
  int64_t compressed_updates(uint32_t param) const { return param < compressed_.size() ? compressed_[param] : 0; }

  /// Whether the sum of the second moments is needed after this step's update.
  bool needs_sum() const;
  /// Takes that sum, of the step. Returns true if the warm-up ends with it.
  bool sum(int64_t step, double sum);
  /// The relative difference between the last two sums, with bias correction.
  double change() const { return change_; }
  /// The number of updates between them.
  int64_t interval() const { return interval_; }

  /// What a checkpoint has of a warm-up that ends by itself.
  struct Saved {
    int64_t end = 0;       // 0: not known yet
    int64_t updates = 0;   // of the last sum; 0: there was none
    double corrected = 0;  // the last sum, with bias correction
  };
  bool is_automatic() const { return freeze_step_ == 0; }
  Saved saved() const { return {end_, last_updates_, last_}; }  // for restore()
  /// Continues the warm-up of a checkpoint.
  void restore(const Saved& saved);

 private:
  int64_t freeze_step_;
  double beta2_;
  int64_t interval_;
  std::vector<int64_t> updates_, compressed_;  // by parameter, before this step
  int64_t most_ = 0;                           // the largest number of updates that a second moment contains
  int64_t end_ = 0, last_updates_ = 0;
  double last_ = 0, change_ = 0;
};

}  // namespace onebit
