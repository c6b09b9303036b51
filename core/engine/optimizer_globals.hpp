// The state of optimizers that belongs to no parameter: the draft extension "zr.optimizer.globals/1".
#pragma once

#include <map>
#include <string>

#include "checkpoint/metadata.hpp"
#include "job/step_context.hpp"

namespace zr::host::engine {

/// Values by name: the optimizer's id, "/", and its own key.
using OptimizerGlobals = std::map<std::string, std::string>;

/// The state of all optimizers. Throws Error if an optimizer fails, or if the ranks differ. Collective if an optimizer
/// has the extension. [step]
OptimizerGlobals save_globals(const job::StepContext& context);

/// Restores what save_globals() has returned, for those optimizers of the saved job that this job has. Throws Error if
/// an optimizer fails. Rank 0 warns of values that are not loaded. [step]
void load_globals(const job::StepContext& context, const checkpoint::CheckpointMetadata& saved);

}  // namespace zr::host::engine
