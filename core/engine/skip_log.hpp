// What is said of steps that were skipped because gradients were not finite.
#pragma once

#include <cstdint>
#include <string>

#include "engine/step_context.hpp"
#include "engine/step_sync.hpp"
#include "engine/training_progress.hpp"

namespace zr::host {

/// Training thread only; the same calls on all ranks, of which rank 0 logs.
class SkipLog {
 public:
  /// Refers to the context.
  explicit SkipLog(const StepContext& context) : context_(context) {}
  /// Logs a skipped step, which `progress` counts already: the first ten, then at most one in a hundred steps.
  void report(const GlobalStats& global, const TrainingProgress& progress);
  /// Ends the job, whose last train.max_skipped_steps steps were skipped: throws Failure(user) naming parameter and
  /// rank.
  [[noreturn]] void give_up(const GlobalStats& global, const TrainingProgress& progress) const;
  /// Which keys to change: "lower optimizer.lr or set train.gradient_clipping".
  std::string remedy() const;

 private:
  bool is_fp16() const { return context_.plan.input.weight_dtype == ZR_F16; }
  std::string name_of(int64_t param) const;
  const StepContext& context_;
  int64_t skips_ = 0, skips_reported_ = 0, lines_ = 0;  // steps of this run
  int64_t last_line_ = 0;                               // a step
};

}  // namespace zr::host
