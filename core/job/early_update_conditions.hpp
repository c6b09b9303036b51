// In which jobs updates of states on tiers may begin during backward.
#pragma once

#include <string>

#include "config/config.hpp"
#include "plan/plan.hpp"

namespace zr::host::job {

/// Why the update of this job does not begin before backward has ended; empty: it does. A job without states on tiers
/// does not.
std::string early_update_obstacle(const config::JobConfig& config, const plan::MemoryPlan& plan);
/// Whether no step of the job is skipped or clipped, so that an early update is not speculative.
bool updates_in_place(const config::JobConfig& config);
/// The memory for undoing early updates that the plan of a job needs.
plan::Speculation speculation_of(const config::JobConfig& config, const plan::PlanInput& input);

}  // namespace zr::host::job
