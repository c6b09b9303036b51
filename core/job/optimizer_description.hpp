// What an optimizer declares about the update of each parameter.
#pragma once

#include <cstdint>
#include <vector>

#include "job/optimizers.hpp"
#include "plan/plan.hpp"

namespace zr::host::job {

/// For plan::PlanInput: the descriptions that differ, at least one, and the index of each parameter's.
struct OptimizerDescriptions {
  std::vector<plan::OptimizerDescription> descriptions;
  std::vector<uint32_t> description_of;
};

/// Asks each parameter's optimizer to describe it. Throws Error if a description has bits or values that the engine
/// does not know, or if two states of a parameter have the same name. [control]
OptimizerDescriptions describe_parameters(const Optimizers& optimizers, const std::vector<plan::Parameter>& parameters);

}  // namespace zr::host::job
