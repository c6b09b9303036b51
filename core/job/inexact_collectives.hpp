// Collectives between hosts that need not be exact: communicator.exact, communicator.gradients, communicator.weights.
#pragma once

#include <cstdint>

#include "config/config.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"

namespace zr::host::job {

/// The flags that replace ZR_COLL_GRADIENTS and ZR_COLL_WEIGHTS; 0: exact.
struct InexactCollectives {
  uint32_t gradients = 0, weights = 0;
};

/// True if gathers of weights round them, with this communicator (null: one rank).
bool rounds_weights(const config::JobConfig& config, const plugin::Instance* communicator);

/// Throws UserError if a key asks for what the communicator or the strategy does not support. With `one_host`, a key
/// that rounds values, or that the communicator does not support, has no effect; `warn`: a warning says so.
InexactCollectives inexact_collectives(const config::JobConfig& config, const plan::MemoryPlan& plan,
                                       const plugin::Instance* communicator, bool one_host, bool warn);

}  // namespace zr::host::job
