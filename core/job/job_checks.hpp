// Checks before a job allocates memory: its strategy, its optimizers, and differences between the ranks.
#pragma once

#include <string>

#include "job/started_job.hpp"
#include "model/model.hpp"

namespace zr::host::job {

/// Throws UserError if the plan shards a parameter and the strategy cannot gather it before its use.
void check_strategy(const plan::MemoryPlan& plan, const plugin::Instance& strategy);
/// Throws UserError if an optimizer needs something that the engine or the job's strategy does not support.
void check_optimizers(const plan::MemoryPlan& plan, const Optimizers& optimizers, const std::string& strategy);
/// Throws UserError if an optimizer needs gradients that are not reduced over ranks, and the strategy or a key excludes
/// them.
void check_local_gradients(const config::JobConfig& config, const plan::MemoryPlan& plan, const Optimizers& optimizers,
                           const plugin::Instance& strategy);
/// Everything that all ranks must have in common, one item per line: plug-ins with the hashes of the files that were
/// loaded, parameters, configuration without job.ranks, and buffers.
std::string setup_text(const StartedJob& job, model::Model& model);
/// The first lines that differ between the set-up of `rank` and that of rank 0, as text. The set-ups must differ.
std::string first_difference(const std::string& own_setup, const std::string& rank_zero_setup, int rank);
/// Collective. Throws UserError on all ranks if a rank differs from rank 0 in plug-ins, parameters, configuration
/// or buffers; the message contains the first difference.
void compare_ranks(StartedJob& job, model::Model& model);

/// Throws UserError: the strategy has no buffer to hold this gradient across micro-steps.
[[noreturn]] void fail_not_held(const std::string& strategy, const std::string& parameter);

}  // namespace zr::host::job
