// How far training has come: steps and updates made, the micro-steps of the coming step, and results of the last one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "engine/loss_scale.hpp"

namespace zr::host {

/// Counters and flags without communication or I/O; the same on all ranks, except losses, weights and tokens of the
/// coming step, which are this rank's. Training thread only.
class TrainingProgress {
 public:
  /// `parameters`: their number; `steps`: train.steps.
  TrainingProgress(const LossScaleKeys& keys, int accumulation, std::size_t parameters, int64_t steps);
  /// With the keys of a configuration.
  TrainingProgress(const JobConfig& config, std::size_t parameters);

  int64_t step() const { return step_; }                               // steps made
  int64_t updates() const { return updates_; }                         // of them not skipped: the schedule's clock
  int64_t samples() const { return samples_; }                         // of all ranks, in all steps
  int64_t steps() const { return steps_; }                             // train.steps
  bool last_step_applied() const { return applied_; }                  // it updated the weights
  int64_t steps_of_run() const { return step_ - begun_; }              // made since this run began
  bool updated_in_run() const { return updates_ != updates_before_; }  // some step of this run updated the weights
  bool stopped() const { return stopped_; }  // a signal asked for the end, and this step is the last
  void stop() { stopped_ = true; }
  bool done() const { return stopped_ || step_ >= steps_; }
  double loss() const { return loss_; }            // of the last step
  double grad_norm() const { return grad_norm_; }  // likewise
  float grad_mul() const { return grad_mul_; }     // reduced gradients were multiplied by it before the last update
  LossScale& loss_scale() { return loss_scale_; }
  const LossScale& loss_scale() const { return loss_scale_; }
  /// By parameter: the number of its updates.
  const std::vector<int64_t>& param_steps() const { return param_steps_; }
  void set_param_steps(uint32_t param, int64_t steps) { param_steps_[param] = steps; }

  int accumulation() const { return accumulation_; }
  int micro() const { return micro_; }  // micro-steps of the coming step that were made
  /// The coming step has all its micro-steps.
  bool at_boundary() const { return micro_ == accumulation_; }
  bool in_backward() const { return in_backward_; }                // also after an exception ended one
  bool within_step() const { return in_backward_ || micro_ > 0; }  // after the first backward of a step
  const std::vector<double>& losses() const { return losses_; }    // by micro-step
  const std::vector<double>& weights() const { return weights_; }  // likewise: of the micro-batches
  int64_t tokens() const { return tokens_; }                       // of this rank since the last step
  void add_tokens(int64_t tokens) { tokens_ += tokens; }

  /// Around one backward; cancel_micro() instead of end_micro() makes it as if it had not begun.
  void begin_micro(double loss, double weight);
  void cancel_micro();  // see above
  void end_micro();     // see above
  /// The coming step begins again with its first micro-step.
  void drop_micro_steps();

  /// What gradients of the coming update are multiplied by.
  void set_grad_mul(float factor) { grad_mul_ = factor; }
  /// The optimizer is about to update these parameters (by parameter: not 0); updated(): it did.
  void begin_update(const std::vector<char>& touched);
  void updated() { ++updates_; }  // see above
  /// The step was made, with an update or without; its reduced gradients can be read until the next backward.
  void made(double loss, double grad_norm, bool applied);
  /// Its micro-steps are over; `samples`: of all ranks.
  void end_step(int64_t samples);

  /// Continues from a checkpoint's counters; this run then begins there.
  void restore(int64_t step, int64_t updates, int64_t samples, bool applied);
  /// What a session with another list of parameters had come to: this one continues its run.
  struct Run {
    int64_t begun = 0, updates_before = 0;  // steps and updates before the run
    bool stopped = false;
    double loss = 0, grad_norm = 0;
  };
  Run run() const { return {begun_, updates_before_, stopped_, loss_, grad_norm_}; }
  /// See Run.
  void continue_run(const Run& run);

  /// A load began to overwrite the weights, or ended.
  void begin_load();
  void end_load() { incomplete_ = false; }  // see above
  /// Throws Failure(user) if the last load failed after it had begun to overwrite the weights.
  void check_complete() const;
  /// Likewise, and if the last backward ended with an exception.
  void check_backward() const;
  /// Throws Failure(user), naming the parameter, if there are no reduced gradients of a step to read.
  void check_gradients(const std::string& parameter) const;

 private:
  const int accumulation_;
  const int64_t steps_;
  LossScale loss_scale_;
  int64_t step_ = 0, updates_ = 0, samples_ = 0;
  int64_t begun_ = 0, updates_before_ = 0;
  std::vector<int64_t> param_steps_;
  bool applied_ = true, stopped_ = false;
  double loss_ = 0, grad_norm_ = 0;
  float grad_mul_ = 1;
  int micro_ = 0;
  bool in_backward_ = false;
  bool gradients_summed_ = false;  // those of the last step, until the next backward or load
  bool incomplete_ = false;
  std::vector<double> losses_, weights_;
  int64_t tokens_ = 0;
};

}  // namespace zr::host
