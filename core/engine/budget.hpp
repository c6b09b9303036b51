// memory.device_budget: what a job that needs more could change, and how it is told.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plugin/plugin_selection.hpp"

namespace zr::host {

/// A change of the TOML file, as overrides, and what a rank needs then.
struct Suggestion {
  std::vector<std::string> overrides;
  int ranks = 0;           // that the job then has
  double activations = 1;  // their part that is left
  int64_t bytes = 0;
};

/// A job that is over its budget.
struct BudgetShortfall {
  int64_t budget, plan, activations;  // bytes of a rank; activations 0: not known
  int64_t bytes() const { return plan + activations; }
};

/// What the plan of an edited job needs on a rank; nothing if the job makes no sense then.
using RequiredBytes = std::function<std::optional<int64_t>(const Suggestion&)>;

/// At most three edits with which the job fits, those that save most first; of two keys only where one is not enough.
std::vector<Suggestion> fitting_suggestions(const ResolvedJob& job, int ranks, const BudgetShortfall& over,
                                            const RequiredBytes& need);
/// As lines, with what each saves.
std::string text_of(const std::vector<Suggestion>& suggestions, const BudgetShortfall& over);

}  // namespace zr::host
