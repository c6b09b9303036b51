// The random generator that dropout draws from: seeded for every micro-batch.
#pragma once

#include "engine/step_context.hpp"
#include "engine/training_progress.hpp"

namespace zr::host {

/// The coming micro-batch of this rank, counted over all ranks from the first of the step.
int64_t micro_index(const StepContext& context, const TrainingProgress& progress);
/// Seeds the model for that micro-batch of the coming step (README.md has the formula). Training thread.
void seed_model(const StepContext& context, const TrainingProgress& progress);

}  // namespace zr::host
