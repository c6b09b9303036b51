// How training starts: every rank has rank 0's parameters and buffers, and the model is bound to them.
#pragma once

#include "engine/sharded_state.hpp"
#include "engine/step_context.hpp"

namespace zr::host {

/// Constructs a deferred model; broadcasts rank 0's parameters and buffers; binds the parameters of which this rank has
/// all elements to the state's memory. Collective, once per state, before any other use of it.
void take_rank_zero(const StepContext& context, ShardedState& state);

}  // namespace zr::host
