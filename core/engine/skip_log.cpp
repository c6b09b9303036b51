#include "engine/skip_log.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"

namespace zr::host::engine {

std::string SkipLog::name_of(int64_t param) const {
  return fmt::format("'{}'", context_.plan.input.parameters[static_cast<std::size_t>(param)].name);
}

std::string SkipLog::remedy() const {
  return fmt::format("lower optimizer.lr or set train.gradient_clipping{}",
                     is_fp16() ? ", or set train.dtype = \"bf16\", which has the range of fp32" : "");
}

std::string SkipLog::cause_of(const GlobalStats& global) const {
  std::string text = global.non_finite_rank >= 0
                         ? fmt::format("the gradient of {} is not finite on rank {}", name_of(global.first_local_param),
                                       global.non_finite_rank)
                         : fmt::format("the reduced gradient of {} is not finite", name_of(global.first_param));
  if (global.loss_rank >= 0) text += fmt::format("; the loss of rank {} is not finite either", global.loss_rank);
  return text;
}

void SkipLog::report(const GlobalStats& global, const TrainingProgress& progress) {
  constexpr int64_t kLines = 10, kSteps = 100;
  ++skips_;
  if (lines_ >= kLines && progress.step() - last_line_ < kSteps) return;
  std::string text = fmt::format("step {} skipped, weights unchanged: {}", progress.step(), cause_of(global));
  if (is_fp16()) text += fmt::format("; the loss scale is now {}", shortest(progress.loss_scale().value()));
  if (const int64_t silent = skips_ - skips_reported_ - 1; silent > 0)
    text += fmt::format("; steps skipped since the last such line: {}", silent);
  if (++lines_ == kLines)
    text += fmt::format(
        "; from now on at most one such line is logged per {} steps; metrics.jsonl marks every skipped step with "
        "`skipped`",
        kSteps);
  skips_reported_ = skips_;
  last_line_ = progress.step();
  if (context_.rank() == 0) log(ZR_LOG_WARN, text);
}

void SkipLog::stop(const GlobalStats& global, TrainingProgress& progress) const {
  const std::string step = fmt::format("step {}", progress.step() + 1);
  progress.break_off(fmt::format(
      "training stopped in {}, because a gradient was not finite (train.nonfinite = \"stop\"); resume from the last "
      "checkpoint",
      step));
  fail_user(
      fmt::format("{}: {}, and train.nonfinite = \"stop\" ({}); check the data, {}, or set train.nonfinite = "
                  "\"skip\"; then resume from the last checkpoint",
                  step, cause_of(global), context_.config().train().nonfinite.origin.text(), remedy()));
}

void SkipLog::fail_too_many_skips(const GlobalStats& global, const TrainingProgress& progress) const {
  const int64_t skips = progress.loss_scale().skips_in_a_row();
  std::string text =
      fmt::format("gradients were not finite in {}{}, as many as train.max_skipped_steps ({}) allows: ", skips,
                  skips == 1 ? " step" : " steps in a row", context_.config().train().max_skipped_steps.origin.text());
  text += global.non_finite_rank >= 0 ? fmt::format("{} was the first parameter that overflowed, on rank {}",
                                                    name_of(global.first_local_param), global.non_finite_rank)
                                      : fmt::format(
                                            "{} was the first parameter whose sum over ranks and "
                                            "micro-batches overflowed, although no rank's own gradient did",
                                            name_of(global.first_param));
  if (global.loss_rank >= 0) text += fmt::format("; the loss of rank {} was not finite either", global.loss_rank);
  text += fmt::format("; the weights are those after step {}", progress.step() - skips);
  if (is_fp16()) text += fmt::format(", and the loss scale is {}", shortest(progress.loss_scale().value()));
  fail_user(fmt::format("{}; check the data of that rank, {}", text, remedy()));
}

}  // namespace zr::host::engine
