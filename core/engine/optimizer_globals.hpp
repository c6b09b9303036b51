// The state of optimizers that belongs to no parameter: the draft extension "zr.optimizer.globals/1".
#pragma once

#include <map>
#include <string>

#include "engine/step_context.hpp"

namespace zr::host::engine {

/// Values by name. The names of optimizers of groups begin with the optimizer's id and "/".
using OptimizerGlobals = std::map<std::string, std::string>;

/// The state of all optimizers. Throws Error if an optimizer fails. [step]
OptimizerGlobals save_globals(const StepContext& context);

/// Restores what save_globals() has returned. Throws Error if an optimizer fails. [step]
void load_globals(const StepContext& context, const OptimizerGlobals& saved);

}  // namespace zr::host::engine
