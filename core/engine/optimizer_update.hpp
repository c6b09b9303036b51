// Runs the optimizer on everything that this rank updates, with the learning rate of each parameter group.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/partial_sums.hpp"
#include "engine/sharded_state.hpp"
#include "engine/step_context.hpp"

namespace zr::host::engine {

/// Training thread only.
class OptimizerUpdate {
 public:
  /// Keeps references to both arguments. Collective.
  OptimizerUpdate(const StepContext& context, ShardedState& state);

  /// The learning rate of an update for a group with lr_scale 1; `index` 0 is the first.
  using Schedule = std::function<double(int64_t index)>;
  /// From the next step on, replaces optimizer.lr and [schedule]. Empty: they apply again.
  void set_schedule(Schedule schedule) { schedule_ = std::move(schedule); }
  /// The learning rate of update `index`. Collective if the program has set a schedule: throws UserError on all ranks
  /// if its values differ between ranks or are invalid.
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

  /// Starts to read states on disk and returns.
  void read_ahead() { state_.states().read_ahead(state_.slices()); }
  /// The arguments of one update.
  struct Input {
    float grad_mul;  // the factor for reduced gradients
    int64_t number;  // of the update; the first is 1
    double grad_norm;
    double rate;                        // learning rate of a group with lr_scale 1
    const std::vector<int64_t>& steps;  // by parameter: number of its updates, including this one
    const std::vector<char>& touched;   // by parameter: 0 means no update
  };
  /// Updates this rank's masters, states and weights. Collective if the optimizer needs sums over parameters.
  void run(const Input& input);

 private:
  const StepContext& context_;
  ShardedState& state_;
  PartialSums sums_;
  std::vector<update::Optimizer> optimizers_;
  std::vector<double> group_rates_;
  Schedule schedule_;
  GradientEdit edit_;
};

}  // namespace zr::host::engine
