// Runs the optimizer on everything that this rank updates, with the learning rate of each parameter group.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "engine/early_update.hpp"
#include "engine/gradient_flow.hpp"
#include "engine/partial_sums.hpp"
#include "engine/step_sync.hpp"
#include "engine/training_progress.hpp"
#include "engine/weight_flow.hpp"
#include "engine/weight_monitor.hpp"
#include "job/step_context.hpp"
#include "state/sharded_state.hpp"

namespace zr::host::engine {

/// Training thread only.
class OptimizerUpdate {
 public:
  /// What an update that begins during backward needs of the engine; all outlive the object.
  struct Parts {
    StepSync& step_sync;
    const GradientFlow& gradients;
    WeightMonitor& monitor;
    WeightFlow& flow;
    TrainingProgress& progress;
  };
  /// Keeps references to both arguments. Collective.
  OptimizerUpdate(const job::StepContext& context, state::ShardedState& state);
  ~OptimizerUpdate();
  OptimizerUpdate(const OptimizerUpdate&) = delete;

  /// The learning rate of an update for a group with lr_scale 1; `index` 0 is the first.
  using Schedule = std::function<double(int64_t index)>;
  /// From the next step on, replaces optimizer.lr and [schedule]. Empty: they apply again.
  void set_schedule(Schedule schedule) { schedule_ = std::move(schedule); }
  /// The learning rate of update `index`; if the update has begun, that of its begin. Collective if the program has set
  /// a schedule: throws UserError on all ranks if its values differ between ranks or are invalid.
  double learning_rate(int64_t index) const;

  /// Changes `values`: elements [first, first + count) of a parameter's averaged gradient, before clipping.
  using GradientEdit = std::function<void(uint32_t param, int64_t first, int64_t count, float* values)>;
  /// Applies to all later steps. Call it between steps. Empty: gradients are not edited.
  void set_gradient_edit(GradientEdit edit) { edit_ = std::move(edit); }
  bool edits_gradients() const { return edit_ != nullptr; }
  /// Averages this rank's reduced gradients, which are `divisor` times too large, and edits those of touched
  /// parameters.
  void edit_gradients(double divisor, const std::vector<char>& touched) {
    state_.edit_gradients(static_cast<float>(1 / divisor), touched, edit_);
  }

  /// Lets updates begin during backward on the ranks whose plan permits it (early_update_obstacle). trace: null: no
  /// trace. Collective.
  void allow_early(const Parts& parts, Trace* trace);
  /// Call before the last backward of a step: begins the update if allow_early() permits it, and then
  /// TrainingProgress::updates_early() is true until the end of the step; collective then.
  void begin_early();
  /// Undoes begin_early() on this rank, for a backward that failed before its first gradient and will be repeated.
  void cancel_early();
  /// Whether updates may begin during backward on any rank.
  bool allows_early() const { return parts_.has_value(); }
  /// Starts to read states on disk and returns. Without effect if the update has begun.
  void read_ahead();
  /// Ends what begin_early() began, before the rest of the update and before writes to weights are collected. It has
  /// failed if a part of the update failed, if a tier failed, or if the program has written to weights since: then this
  /// rank's states are undefined. Without effect unless allows_early().
  void end_early();
  /// Whether that, or read_ahead(), has failed on this rank.
  bool early_failed() const { return early_failure_ != nullptr; }
  /// After the ranks have exchanged early_failed(): breaks training off and throws on all ranks if a rank failed.
  /// failed_rank: the first one; -1: none.
  void check_early(int failed_rank) const;
  /// Call before the program reads or replaces weights or states, or sets a learning rate; `call` names the call.
  /// Throws UserError if an update has begun, and if training was broken off. All ranks call it.
  void before_access(const std::string& call);
  /// Elements on tiers that this rank updates per step, if updates may begin early; and how many of them were updated
  /// early in the last step.
  int64_t elements_on_tiers() const { return early_ ? early_->elements() : 0; }
  int64_t elements_early() const { return elements_early_; }
  /// Seconds of early updates so far.
  double early_seconds(EarlyUpdate::Work work) const { return early_ ? early_->seconds(work) : 0; }
  /// Number of steps with early updates.
  int64_t adopted() const { return adopted_; }
  /// Bytes of states and masters in these updates.
  int64_t bytes_early() const { return bytes_early_; }
  /// The arguments of one update.
  struct Input {
    float grad_mul;  // the factor for reduced gradients
    int64_t number;  // of the update; the first is 1
    double grad_norm;
    double rate;                        // learning rate of a group with lr_scale 1
    const std::vector<int64_t>& steps;  // by parameter: number of its updates, including this one
    const std::vector<char>& touched;   // by parameter: 0 means no update
  };
  /// Call instead of run() in a step that updates nothing.
  void skip();
  /// Call if a step fails: breaks training off if its update has begun early.
  void step_failed();
  /// Call if the number of micro-steps changes, between steps.
  void forget_order() {
    forget_begin();
    if (early_) early_->forget_order();
  }
  /// Call before a step begins again with other counters, because a checkpoint is loaded. All ranks call it.
  void forget_begin() { begun_.reset(); }
  /// Updates this rank's masters, states and weights. Collective if the optimizer needs sums over parameters.
  void run(const Input& input);
  /// By parameter: the learning rate. rate: of a group with lr_scale 1.
  std::vector<double> rates(double rate) const;

 private:
  // What the ranks have exchanged for this step's update.
  struct Begun {
    bool has_weight;            // the weights of the step's micro-batches have a valid sum
    double weight;              // of this rank's last micro-batch
    double divisor;             // of reduced gradients
    double rate;                // learning rate of a group with lr_scale 1
    std::vector<char> touched;  // by parameter: not 0 if an earlier micro-batch of the step had a gradient on any rank
  };
  double next_learning_rate(int64_t index, const char* call) const;
  void abandon_early();
  void keep_failure();

  const job::StepContext& context_;
  state::ShardedState& state_;
  PartialSums sums_;
  std::vector<update::Optimizer> optimizers_;
  std::vector<double> group_rates_;
  Schedule schedule_;
  GradientEdit edit_;
  std::optional<Parts> parts_;        // empty: the update begins after backward on all ranks
  std::optional<EarlyUpdate> early_;  // empty: on this rank
  std::optional<Begun> begun_;        // empty: no update has begun
  bool is_early_ = false;             // this rank's update has begun
  std::exception_ptr early_failure_;  // of this rank; null: none
  int64_t elements_early_ = 0, bytes_early_ = 0;
  int64_t adopted_ = 0;  // steps
};

}  // namespace zr::host::engine
