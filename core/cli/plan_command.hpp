// `zeroth plan`: bytes per rank by kind and communication per step, for any number of ranks, without training.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "cli/model_query.hpp"

namespace zr::host::cli {

struct PlanOptions {
  bool compare = false;  // a table of all available strategies
  std::optional<std::string> hosts, link;
};

/// Prints the plan; with `hosts`, as parse_host_sizes() accepts them, also what they transfer per step, and with
/// `link`, as bits_per_second() accepts it, the time of that. Returns the exit code. Throws Error, also if the plan
/// exceeds memory.device_budget.
int print_plan(ModelQueryOptions query, const PlanOptions& options, const std::filesystem::path& bin);

/// Prints the tier of each part of the training state and the reason, as the last part of `zeroth explain`; nothing if
/// all state is on the device. Returns the exit code.
int explain_placement(const ModelQueryOptions& options, const std::filesystem::path& bin);

}  // namespace zr::host::cli
