// memory.device_budget: what a job that needs more could change, and how it is told.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plugin/choice.hpp"

namespace zr::host {

/// A change of the TOML file, as overrides, and what a rank needs then.
struct Edit {
  std::vector<std::string> overrides;
  int ranks = 0;           // that the job then has
  double activations = 1;  // their part that is left
  int64_t bytes = 0;
};

/// A job that is over its budget.
struct Overdraft {
  int64_t budget, plan, activations;  // bytes of a rank; activations 0: not known
  int64_t bytes() const { return plan + activations; }
};

/// What the plan of an edited job needs on a rank; nothing if the job makes no sense then.
using Need = std::function<std::optional<int64_t>(const Edit&)>;

/// At most three edits with which the job fits, those that save most first; of two keys only where one is not enough.
std::vector<Edit> edits_that_fit(const JudgedJob& job, int ranks, const Overdraft& over, const Need& need);
/// As lines, with what each saves.
std::string text_of(const std::vector<Edit>& edits, const Overdraft& over);

}  // namespace zr::host
