#include "engine/training_progress.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace zr::host::engine {

TrainingProgress::TrainingProgress(const LossScaleKeys& keys, int accumulation, std::size_t parameters, int64_t steps)
    : accumulation_(accumulation),
      steps_(steps),
      loss_scale_(keys),
      param_steps_(parameters, 0),
      param_local_steps_(parameters, 0) {}

TrainingProgress::TrainingProgress(const config::JobConfig& config, std::size_t parameters)
    : TrainingProgress(LossScaleKeys::of(config), config.train().gradient_accumulation, parameters,
                       config.train().steps) {}

void TrainingProgress::begin_micro(Loss loss, double weight) {
  in_backward_ = true;
  gradients_summed_ = false;
  losses_.push_back(std::move(loss));
  weights_.push_back(weight);
}

void TrainingProgress::cancel_micro() {
  losses_.pop_back();
  weights_.pop_back();
  in_backward_ = false;
}

void TrainingProgress::end_micro() {
  in_backward_ = false;
  ++micro_;
}

void TrainingProgress::drop_micro_steps() {
  micro_ = 0;
  updates_early_ = false;
  losses_.clear();
  weights_.clear();
  tokens_ = 0;
}

void TrainingProgress::begin_update(const std::vector<char>& touched) {
  updating_ = true;
  for (std::size_t i = 0; i < touched.size(); ++i) {
    param_steps_[i] += touched[i] ? 1 : 0;
    param_local_steps_[i] += touched[i] && gradients_local_ ? 1 : 0;
  }
}

void TrainingProgress::updated() {
  updating_ = false;
  ++updates_;
}

void TrainingProgress::step_failed() {
  if (updating_)
    break_off(
        fmt::format("training stopped in step {}, because engine.step() failed during the update of the weights; "
                    "resume from the last checkpoint",
                    step_ + 1));
}

void TrainingProgress::complete_step(double loss, double grad_norm, bool applied) {
  ++step_;
  micro_ = 0;
  gradients_consumed_ = std::exchange(updates_early_, false);
  gradients_summed_ = true;
  last_step_applied_ = applied;
  loss_ = loss;
  grad_norm_ = grad_norm;
}

void TrainingProgress::end_step(int64_t samples) {
  losses_.clear();
  weights_.clear();
  tokens_ = 0;
  samples_ += samples;
}

void TrainingProgress::restore(int64_t step, int64_t updates, int64_t samples, bool applied) {
  step_ = steps_before_ = step;
  updates_ = updates_before_ = updates;
  samples_ = samples;
  last_step_applied_ = applied;
}

void TrainingProgress::continue_run(const Run& run) {
  steps_before_ = run.steps_before;
  updates_before_ = run.updates_before;
  stopped_ = run.stopped;
  loss_ = run.loss;
  grad_norm_ = run.grad_norm;
  learning_rate_ = run.learning_rate;
}

void TrainingProgress::begin_load() {
  incomplete_ = true;
  gradients_summed_ = false;
}

void TrainingProgress::check_broken_off() const {
  if (!broken_off_.empty()) fail_user(broken_off_);
}

void TrainingProgress::check_complete() const {
  check_broken_off();
  if (incomplete_) fail_user("the last load failed part-way, so the weights are undefined; load another checkpoint");
}

void TrainingProgress::check_no_early_update(const std::string& call) const {
  check_broken_off();
  if (updates_early_)
    fail_user(fmt::format(
        "{} was called after the last engine.backward() of a step had begun and before its engine.step(), while "
        "optimizer states on tiers are updated; call it after engine.step(), or set offload.overlap = false",
        call));
}

// After a failed backward, an unknown subset of its gradients is already in the buckets.
void TrainingProgress::check_backward() const {
  check_complete();
  if (in_backward_)
    fail_user(
        "the last engine.backward() ended with an exception, so its gradients are incomplete; end the job, or create "
        "a new engine");
}

// Before the last micro-step the contents of reduced gradients depend on the strategy, so they cannot be read.
void TrainingProgress::check_gradients(const std::string& parameter) const {
  const std::string call = fmt::format("engine.get('{}', zr::TensorKind::gradient): ", parameter);
  if (gradients_summed_ && gradients_consumed_)
    fail_user(call +
              "the update, part of which ran during backward, has overwritten the gradients; set offload.overlap = "
              "false to keep them after engine.step()");
  if (gradients_summed_ && gradients_local_)
    fail_user(call +
              "in this step the optimizer exchanged compressed values instead of gradients, so no rank has the reduced "
              "gradient; read it in a step before that");
  if (gradients_summed_) return;
  if (within_step())
    fail_user(
        fmt::format("{}the gradient is not reduced over ranks and micro-batches until engine.step() ends the step; "
                    "call engine.get() after engine.step(), which keeps the gradient until the next engine.backward()",
                    call));
  fail_user(call + "this engine has no gradient yet; call engine.get() after engine.backward() and engine.step()");
}

}  // namespace zr::host::engine
