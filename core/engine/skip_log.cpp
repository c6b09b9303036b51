#include "engine/skip_log.hpp"

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"

namespace zr::host::engine {

std::string SkipLog::name_of(int64_t param) const {
  return "'" + context_.plan.input.parameters[static_cast<std::size_t>(param)].name + "'";
}

std::string SkipLog::remedy() const {
  return std::string("lower optimizer.lr or set train.gradient_clipping") +
         (is_fp16() ? ", or set train.dtype = \"bf16\", which has the range of fp32" : "");
}

void SkipLog::report(const GlobalStats& global, const TrainingProgress& progress) {
  constexpr int64_t kLines = 10, kSteps = 100;
  ++skips_;
  if (lines_ >= kLines && progress.step() - last_line_ < kSteps) return;
  std::string text = "step " + std::to_string(progress.step()) + " skipped, weights unchanged: ";
  text += global.non_finite_rank >= 0 ? "the gradient of " + name_of(global.first_local_param) +
                                            " is not finite on rank " + std::to_string(global.non_finite_rank)
                                      : "the reduced gradient of " + name_of(global.first_param) + " is not finite";
  if (global.loss_rank >= 0) text += "; the loss of rank " + std::to_string(global.loss_rank) + " is not finite either";
  if (is_fp16()) text += "; the loss scale is now " + shortest(progress.loss_scale().value());
  if (const int64_t silent = skips_ - skips_reported_ - 1; silent > 0)
    text += "; steps skipped since the last such line: " + std::to_string(silent);
  if (++lines_ == kLines)
    text += "; from now on at most one such line is logged per " + std::to_string(kSteps) +
            " steps; metrics.jsonl marks every skipped step with `skipped`";
  skips_reported_ = skips_;
  last_line_ = progress.step();
  if (context_.rank() == 0) log(ZR_LOG_WARN, text);
}

void SkipLog::give_up(const GlobalStats& global, const TrainingProgress& progress) const {
  const int64_t skips = progress.loss_scale().skips_in_a_row();
  std::string text = "gradients were not finite in " + std::to_string(skips) +
                     (skips == 1 ? " step" : " steps in a row") + ", as many as train.max_skipped_steps (" +
                     context_.config().train().max_skipped_steps.origin.text() + ") allows: ";
  text += global.non_finite_rank >= 0
              ? name_of(global.first_local_param) + " was the first parameter that overflowed, on rank " +
                    std::to_string(global.non_finite_rank)
              : name_of(global.first_param) +
                    " was the first parameter whose sum over ranks and "
                    "micro-batches overflowed, although no rank's own gradient did";
  if (global.loss_rank >= 0)
    text += "; the loss of rank " + std::to_string(global.loss_rank) + " was not finite either";
  text += "; the weights are those after step " + std::to_string(progress.step() - skips);
  if (is_fp16()) text += ", and the loss scale is " + shortest(progress.loss_scale().value());
  fail_user(text + "; check the data of that rank, " + remedy());
}

}  // namespace zr::host::engine
