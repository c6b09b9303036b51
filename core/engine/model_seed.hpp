// Seeds of random generators: of the model's, which dropout uses, for every micro-batch, and of the program's.
#pragma once

#include <cstdint>

#include "engine/training_progress.hpp"
#include "job/step_context.hpp"

namespace zr::host::engine {

/// Index of this rank's next micro-batch, counted over all ranks from the first of the step.
int64_t micro_index(const job::StepContext& context, const TrainingProgress& progress);
/// Seeds the model for that micro-batch (docs/numerics.md, section 1). Training thread.
void seed_model(const job::StepContext& context, const TrainingProgress& progress);

/// Seed of the program's generator number `key` (Engine::generator()). Any thread.
uint64_t generator_seed(const job::StepContext& context, int64_t key);

}  // namespace zr::host::engine
