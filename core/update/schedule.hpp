// The learning rate of an update: a pure function of the configuration and the step.
#pragma once

#include <cstdint>

#include "config/config.hpp"

namespace zr::host::update {

/// The rate of update `step` (0 is the first; skipped steps do not count), before a group's lr_scale.
/// docs/numerics.md has the formulas.
double learning_rate(const config::JobConfig& config, int64_t step);

}  // namespace zr::host::update
