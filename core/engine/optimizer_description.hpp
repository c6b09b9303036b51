// What an optimizer declares about the update of each parameter.
#pragma once

#include <cstdint>
#include <vector>

#include "base/draft_abi.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"

namespace zr::host::engine {

/// For plan::PlanInput: the descriptions that differ, at least one, and the index of each parameter's.
struct OptimizerDescriptions {
  std::vector<plan::OptimizerDescription> descriptions;
  std::vector<uint32_t> description_of;
};

/// Asks the optimizer to describe every parameter; all groups have been added to it. Throws Error if a description has
/// bits or values that the engine does not know, or if two states of a parameter have the same name. [control]
OptimizerDescriptions describe_optimizer(const plugin::Instance& optimizer,
                                         const std::vector<plan::Parameter>& parameters);

/// The optimizer's functions for partial sums; null if it has none.
const zr_partial_sums_api* partial_sums_of(const plugin::Instance& optimizer);

}  // namespace zr::host::engine
