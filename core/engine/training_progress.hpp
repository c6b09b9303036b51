// The progress of training: numbers of steps and updates, the micro-steps of the current step, and results of the last
// step.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "config/config.hpp"
#include "engine/loss_scale.hpp"

namespace zr::host::engine {

/// The loss of a micro-batch. On a device it is read in the exchange of the step, so that backward does not wait for
/// it.
class Loss {
 public:
  Loss(double value) : read_([value] { return value; }) {}
  explicit Loss(std::function<double()> read) : read_(std::move(read)) {}
  double value() const { return read_(); }  // may wait for the device

 private:
  std::function<double()> read_;
};

/// Counters and flags, without communication or I/O. They are the same on all ranks, except the losses, weights and
/// tokens of the current step, which are this rank's. Training thread only.
class TrainingProgress {
 public:
  /// `parameters`: number of parameters; `steps`: train.steps.
  TrainingProgress(const LossScaleKeys& keys, int accumulation, std::size_t parameters, int64_t steps);
  /// Takes the other values from the configuration.
  TrainingProgress(const config::JobConfig& config, std::size_t parameters);

  int64_t step() const { return step_; }        // completed steps
  int64_t updates() const { return updates_; }  // steps that were not skipped; the index for the learning-rate schedule
  int64_t samples() const { return samples_; }  // of all ranks, in all steps
  int64_t steps() const { return steps_; }      // train.steps
  int64_t current_step() const { return done() ? step_ : step_ + 1; }  // the step that is being made; 1 is the first
  bool last_step_applied() const { return last_step_applied_; }        // whether it updated the weights
  int64_t steps_of_run() const { return step_ - steps_before_; }       // steps completed since this run began
  bool updated_in_run() const { return updates_ != updates_before_; }  // whether a step of this run updated the weights
  bool stopped() const { return stopped_; }                            // a signal made this step the last one
  void stop() { stopped_ = true; }
  bool done() const { return stopped_ || step_ >= steps_; }
  double loss() const { return loss_; }                    // of the last step
  double grad_norm() const { return grad_norm_; }          // of the last step
  double learning_rate() const { return learning_rate_; }  // of the last step, for a group with lr_scale 1
  float grad_mul() const { return grad_mul_; }             // factor of the reduced gradients in the last update
  LossScale& loss_scale() { return loss_scale_; }
  const LossScale& loss_scale() const { return loss_scale_; }
  /// By parameter: number of its updates.
  const std::vector<int64_t>& param_steps() const { return param_steps_; }
  /// By parameter: number of those updates whose gradients were not reduced.
  const std::vector<int64_t>& param_local_steps() const { return param_local_steps_; }
  /// Sets both numbers.
  void set_param_steps(uint32_t param, int64_t steps, int64_t local_steps = 0) {
    param_steps_[param] = steps;
    param_local_steps_[param] = local_steps;
  }

  int accumulation() const { return accumulation_; }
  /// Sets the number of micro-steps of the steps that follow. Call it between steps.
  void set_accumulation(int accumulation) { accumulation_ = accumulation; }
  int micro() const { return micro_; }  // completed micro-steps of the current step
  /// True if the current step has all its micro-steps.
  bool at_boundary() const { return micro_ == accumulation_; }
  /// The micro-step that the next forward belongs to.
  int next_micro() const { return at_boundary() ? 0 : micro(); }
  bool in_backward() const { return in_backward_; }  // stays true if an exception ended backward
  /// The current step's first backward has begun, or a part of its update.
  bool within_step() const { return in_backward_ || micro_ > 0 || updates_early_; }
  const std::vector<Loss>& losses() const { return losses_; }      // by micro-step
  const std::vector<double>& weights() const { return weights_; }  // by micro-step: weight of the micro-batch
  int64_t tokens() const { return tokens_; }                       // of this rank since the last step
  /// `unit`: what is counted.
  void add_tokens(int64_t tokens, const std::string& unit = "tokens") { tokens_ += tokens, unit_ = unit; }
  const std::string& unit() const { return unit_; }  // "samples" until add_tokens() is called

  /// Begins a micro-step with its backward.
  void begin_micro(Loss loss, double weight);
  void cancel_micro();  // undoes begin_micro()
  void end_micro();     // ends the micro-step
  /// Discards the completed micro-steps of the current step, so that the step begins again.
  void drop_micro_steps();

  /// Sets the factor of the reduced gradients in the next update.
  void set_grad_mul(float factor) { grad_mul_ = factor; }
  /// Sets the learning rate of the current step.
  void set_learning_rate(double rate) { learning_rate_ = rate; }
  /// The ranks have agreed on the arguments of the current step's update, so that it can begin during backward. From
  /// now until the end of the step, check_no_early_update() throws and gradients cannot be read. All ranks call it.
  void begin_early_update() { updates_early_ = true; }
  /// Call before begin_update(): whether this step reduces no gradients, so that none can be read.
  void set_gradients_local(bool local) { gradients_local_ = local; }
  bool updates_early() const { return updates_early_; }
  /// Call before an update. touched: by parameter, not 0 if the optimizer updates it.
  void begin_update(const std::vector<char>& touched);
  void updated();  // call after an update
  /// Call if engine.step() has failed: training cannot continue if it had begun an update.
  void step_failed();
  /// The step cannot be completed, and training cannot continue: check_broken_off() throws UserError with this text.
  void break_off(std::string text) {
    if (broken_off_.empty()) broken_off_ = std::move(text);
  }
  /// Counts the step, with an update (`applied`) or without. Its reduced gradients can be read until the next backward.
  void complete_step(double loss, double grad_norm, bool applied);
  /// Discards the losses, weights and tokens of the completed step. samples: of all ranks in this step.
  void end_step(int64_t samples);

  /// Continues from a checkpoint's counters; the run begins at this step.
  void restore(int64_t step, int64_t updates, int64_t samples, bool applied);
  /// The progress of a run that a refresh hands over to the next session.
  struct Run {
    int64_t steps_before = 0, updates_before = 0;  // numbers of steps and updates when the run began
    bool stopped = false;
    double loss = 0, grad_norm = 0, learning_rate = 0;
  };
  Run run() const { return {steps_before_, updates_before_, stopped_, loss_, grad_norm_, learning_rate_}; }
  /// Continues the run of the previous session.
  void continue_run(const Run& run);

  /// Call before a load overwrites the weights.
  void begin_load();
  void end_load() { incomplete_ = false; }  // call when the load has succeeded
  /// Throws UserError after break_off().
  void check_broken_off() const;
  /// check_broken_off(); also throws UserError if the last load failed after begin_load().
  void check_complete() const;
  /// Throws UserError, which names the call, from begin_early_update() until the end of the step.
  void check_no_early_update(const std::string& call) const;
  /// check_complete(); also throws UserError if the last backward ended with an exception.
  void check_backward() const;
  /// Throws UserError, naming the parameter, if no reduced gradients can be read now.
  void check_gradients(const std::string& parameter) const;

 private:
  int accumulation_;
  const int64_t steps_;
  LossScale loss_scale_;
  int64_t step_ = 0, updates_ = 0, samples_ = 0;
  int64_t steps_before_ = 0, updates_before_ = 0;  // numbers of steps and updates when this run began
  std::vector<int64_t> param_steps_, param_local_steps_;
  bool last_step_applied_ = true, stopped_ = false;
  double loss_ = 0, grad_norm_ = 0, learning_rate_ = 0;
  float grad_mul_ = 1;
  int micro_ = 0;
  bool in_backward_ = false;
  bool gradients_summed_ = false;    // reduced gradients can be read: from a step to the next backward or load
  bool updates_early_ = false;       // a part of the current step's update may have begun
  bool gradients_local_ = false;     // the last step reduced no gradients
  bool gradients_consumed_ = false;  // the last update may have overwritten reduced gradients
  bool updating_ = false;            // between begin_update() and updated()
  std::string broken_off_;           // why training cannot continue; empty: it can
  bool incomplete_ = false;          // a load has begun to overwrite the weights and has not succeeded
  std::vector<Loss> losses_;
  std::vector<double> weights_;
  int64_t tokens_ = 0;
  std::string unit_ = "samples";
};

}  // namespace zr::host::engine
