// The optimizer over everything that this rank updates, with learning rates by parameter group.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/sharded_state.hpp"
#include "engine/step_context.hpp"

namespace zr::host {

/// Training thread only.
class OptimizerUpdate {
 public:
  /// Refers to both.
  OptimizerUpdate(const StepContext& context, ShardedState& state);

  /// Announces the update of that number, 1 at the first, before gradients are complete.
  void announce(int64_t update);
  /// Starts to read states on disk, while the caller does something else.
  void read_ahead() { state_.states().read_ahead(state_.slices()); }
  /// What the update of a step is made with; vectors are by parameter.
  struct Input {
    float grad_mul;
    int64_t number;  // of the update, 1 at the first
    double grad_norm;
    double rate;                        // of a group whose lr_scale is 1
    const std::vector<int64_t>& steps;  // updates of each parameter, this one included
    const std::vector<char>& touched;   // 0: left alone
  };
  /// Updates masters, states and weights of this rank.
  void run(const Input& input);

 private:
  const StepContext& context_;
  ShardedState& state_;
  const uint32_t granularity_;
  std::vector<double> group_rates_;
};

}  // namespace zr::host
