// The start of training: every rank gets rank 0's parameters and buffers, and the model is bound to the state's memory.
#pragma once

#include "job/step_context.hpp"
#include "state/sharded_state.hpp"

namespace zr::host::state {

/// Constructs a deferred model, broadcasts rank 0's parameters and buffers, and binds parameters that are unsharded on
/// this rank to the state's memory. Collective; once per state, before any other use of it.
void broadcast_initial_weights(const job::StepContext& context, ShardedState& state);

}  // namespace zr::host::state
