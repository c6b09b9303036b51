// Whether a plan fits in the budgets of its job, and which changes would make it fit.
#pragma once

#include <string>
#include <vector>

#include "job/budget_suggestions.hpp"
#include "job/setup.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"

namespace zr::host::job {

/// Throws UserError with the plan and suggested changes if the plan exceeds a budget. `communicator`: null for one
/// rank.
void check_budget(const Setup& setup, const plan::MemoryPlan& plan, const std::vector<plan::Parameter>& parameters,
                  const plugin::Instance* communicator);
/// The suggestions for a job with this shortfall, as text.
std::string suggestions_text(const Setup& setup, const plan::MemoryPlan& plan,
                             const std::vector<plan::Parameter>& parameters, const BudgetShortfall& shortfall);

}  // namespace zr::host::job
