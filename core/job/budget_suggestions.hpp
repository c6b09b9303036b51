// Suggestions for a job that exceeds memory.device_budget or memory.host_budget: changes of its configuration with
// which it fits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plugin/plugin_selection.hpp"

namespace zr::host::job {

/// A change of the TOML file, as overrides, and the memory that a rank then needs.
struct Suggestion {
  std::vector<std::string> overrides;
  int ranks = 0;           // number of ranks with the change; 0: unchanged
  double activations = 1;  // activation bytes with the change, as a fraction of those without it
  int64_t bytes = 0;       // per rank, activations included
};

/// A job that exceeds its budget.
struct BudgetShortfall {
  int64_t budget, plan, activations;  // bytes per rank; activations 0: unknown
  int64_t bytes() const { return plan + activations; }
};

/// Planned bytes per rank with the suggestion applied; nullopt if the changed job is invalid.
using RequiredBytes = std::function<std::optional<int64_t>(const Suggestion&)>;

/// At most three suggestions with which the job fits, those that save most first. Pairs of changes only follow if fewer
/// than three single changes fit.
std::vector<Suggestion> fitting_suggestions(const plugin::ResolvedJob& job, int ranks, const BudgetShortfall& shortfall,
                                            const RequiredBytes& required_bytes);
/// As fitting_suggestions(), for a plan that exceeds memory.host_budget. All bytes are totals of the ranks of a node.
std::vector<Suggestion> fitting_host_suggestions(const plugin::ResolvedJob& job, int ranks,
                                                 const BudgetShortfall& shortfall, const RequiredBytes& required_bytes);
/// The suggestions as text, one per line, with the bytes that each one saves and needs.
std::string text_of(const std::vector<Suggestion>& suggestions, const BudgetShortfall& shortfall);

}  // namespace zr::host::job
