// `zeroth plan`: who would own which bytes, for any world, before anything is trained.
#pragma once

#include <filesystem>

#include "cli/model_query.hpp"

namespace zr::host {

/// Prints the plan, with `compare` of all strategies there are; returns the exit code. Throws Failure, also where the
/// plan is over memory.device_budget.
int print_plan(const ModelQueryOptions& options, bool compare, const std::filesystem::path& bin);

/// Prints where each part of the training state stands and why, behind what `zeroth explain` says; nothing if all of
/// it stays on the device. Returns the exit code.
int explain_placement(const ModelQueryOptions& options, const std::filesystem::path& bin);

}  // namespace zr::host
