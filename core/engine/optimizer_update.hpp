// Runs the optimizer on everything that this rank updates, with the learning rate of each parameter group.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/sharded_state.hpp"
#include "engine/step_context.hpp"

namespace zr::host {

/// Training thread only.
class OptimizerUpdate {
 public:
  /// Keeps references to both arguments.
  OptimizerUpdate(const StepContext& context, ShardedState& state);

  /// Announces the update with this number to the optimizer before the gradients are complete. The first number is 1.
  void announce(int64_t update);
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
  /// Updates this rank's masters, states and weights.
  void run(const Input& input);

 private:
  const StepContext& context_;
  ShardedState& state_;
  const uint32_t granularity_;
  std::vector<double> group_rates_;
};

}  // namespace zr::host
