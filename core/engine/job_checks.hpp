// Checks before a job allocates memory: its strategy, its optimizer, and differences between the ranks.
#pragma once

#include "engine/planned_job.hpp"
#include "model/model.hpp"

namespace zr::host::engine {

/// Throws UserError if the plan shards a parameter and the strategy cannot gather it before its use.
void check_strategy(const PlannedJob& job);
/// Throws UserError if the optimizer needs something that the engine or the job's strategy does not support.
void check_optimizer(const PlannedJob& job);
/// Collective. Throws UserError on all ranks if a rank differs from rank 0 in plug-ins, parameters, configuration
/// or buffers; the message contains the first difference.
void compare_ranks(PlannedJob& job, model::Model& model);

}  // namespace zr::host::engine
