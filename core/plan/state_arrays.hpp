// The arrays of masters and optimizer states of a rank.
#pragma once

#include <vector>

#include "plan/plan.hpp"

namespace zr::host::plan {

/// The arrays for the reduced-gradient pieces of `plan`, whose state_offset is known.
std::vector<StateArray> arrays_of(const PlanInput& input, bool has_master, const RankPlan& plan);

}  // namespace zr::host::plan
