// What an optimizer declares about the update of each parameter.
#pragma once

#include <vector>

#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"

namespace zr::host::engine {

/// The granularity, needs and states of the optimizer, the same for all parameters.
struct OptimizerDescription {
  uint32_t granularity = ZR_ELEMENTWISE;  // also those of zr/abi/draft/optimizer_shapes.h
  uint32_t needs = 0;                     // bits of zr/abi/draft/local_gradients.h
  std::vector<zr_slot> slots;             // names are valid as long as the instance
};

/// Asks the optimizer to describe every parameter; all groups have been added to it. Throws Error if a description has
/// bits or values that the engine does not know, if two states have the same name, or if two parameters have different
/// descriptions. [control]
OptimizerDescription describe_optimizer(const plugin::Instance& optimizer,
                                        const std::vector<plan::Parameter>& parameters);

}  // namespace zr::host::engine
