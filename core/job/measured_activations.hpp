// Activation memory as an earlier run with the same model and micro-batch measured it.
#pragma once

#include <string>

#include "config/config.hpp"
#include "plan/plan.hpp"

namespace zr::host::job {

/// The activation bytes per rank that the newest comparable run in the engine's run folder measured: one with the same
/// keys of the program, device, dtype, micro-batch and tier of activations. Reads at most the 8 newest runs. The
/// activations are unknown (nullopt) if there is no such run, or if its summary.json is missing or invalid. `engine`:
/// the engine's name; "" for the unnamed one. Any thread.
plan::PlanContext measured_activations(const config::JobConfig& config, const std::string& engine);

}  // namespace zr::host::job
