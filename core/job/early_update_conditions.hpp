// In which jobs updates of states on tiers may begin during backward.
#pragma once

#include <string>

#include "config/config.hpp"
#include "plan/plan.hpp"

namespace zr::host::job {

/// Why the update of this job does not begin before backward has ended; empty: it does. A job without states on tiers
/// does not.
std::string early_update_obstacle(const config::JobConfig& config, const plan::MemoryPlan& plan);
/// Whether no step of the job is skipped or clipped: then what is updated during backward never has to be undone.
bool never_skips_or_clips(const config::JobConfig& config);

}  // namespace zr::host::job
