// `zeroth plan`: bytes per rank by kind and communication per step, for any number of ranks, without training.
#pragma once

#include <filesystem>
#include <optional>

#include "cli/model_query.hpp"

namespace zr::host::cli {

/// Prints the plan, or with `compare` a table of all available strategies; if options.hosts are given, also what they
/// transfer per step, and the time of that over a link of `link` bits per second. Returns the exit code. Throws Error,
/// also if the plan exceeds memory.device_budget.
int print_plan(const ModelQueryOptions& options, bool compare, std::optional<double> link,
               const std::filesystem::path& bin);

/// Prints the tier of each part of the training state and the reason, as the last part of `zeroth explain`; nothing if
/// all state is on the device. Returns the exit code.
int explain_placement(const ModelQueryOptions& options, const std::filesystem::path& bin);

}  // namespace zr::host::cli
