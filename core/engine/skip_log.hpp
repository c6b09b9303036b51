// Log lines and the final error about steps that were skipped because gradients were not finite.
#pragma once

#include <cstdint>
#include <string>

#include "engine/step_sync.hpp"
#include "engine/training_progress.hpp"
#include "job/step_context.hpp"

namespace zr::host::engine {

/// Training thread only. All ranks make the same calls; only rank 0 logs.
class SkipLog {
 public:
  /// Keeps a reference to the context.
  explicit SkipLog(const job::StepContext& context) : context_(context) {}
  /// Logs a skipped step, which `progress` already counts: the first ten, then at most one per 100 steps.
  void report(const GlobalStats& global, const TrainingProgress& progress);
  /// Ends the job, because its last train.max_skipped_steps steps were skipped: throws UserError naming the
  /// parameter and the rank.
  [[noreturn]] void fail_too_many_skips(const GlobalStats& global, const TrainingProgress& progress) const;
  /// Ends the job, because train.nonfinite is "stop": breaks the progress off, and throws UserError naming the
  /// parameter and the rank.
  [[noreturn]] void stop(const GlobalStats& global, TrainingProgress& progress) const;
  /// The keys to change, as text: "lower optimizer.lr or set train.gradient_clipping".
  std::string remedy() const;

 private:
  bool is_fp16() const { return context_.plan.input.weight_dtype == ZR_F16; }
  std::string name_of(int64_t param) const;
  std::string cause_of(const GlobalStats& global) const;
  const job::StepContext& context_;
  int64_t skips_ = 0, skips_reported_ = 0, lines_ = 0;  // in this run: skipped steps, those reported, lines logged
  int64_t last_line_ = 0;                               // the step of the last line
};

}  // namespace zr::host::engine
