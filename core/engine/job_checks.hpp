// What must hold before a job takes memory: of its strategy and optimizer, and between the ranks.
#pragma once

#include "engine/planned_job.hpp"
#include "model/model.hpp"

namespace zr::host {

/// Throws Failure(user) where the plan shards a parameter that the strategy cannot gather before its use.
void check_strategy(const PlannedJob& job);
/// Throws Failure(user) where the optimizer needs what this host or the job's strategy does not offer.
void check_optimizer(const PlannedJob& job);
/// Collective. Throws Failure(user) with the first difference between a rank and rank 0: plug-ins, parameters,
/// configuration, or buffers.
void compare_ranks(PlannedJob& job, Model& model);

}  // namespace zr::host
