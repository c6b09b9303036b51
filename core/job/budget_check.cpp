#include "job/budget_check.hpp"

#include <memory>

#include "base/error.hpp"
#include "job/offline_plan.hpp"
#include "job/plan_inputs.hpp"

namespace zr::host::job {

namespace {
MakeOfflinePlan offline_plan_with(const Setup& setup, const std::vector<plan::Parameter>& parameters) {
  return [&](const Suggestion& change) {
    return std::make_unique<OfflinePlan>(setup.revalidate(change.overrides, change.ranks), parameters, change.ranks);
  };
}
}  // namespace

std::string suggestions_text(const Setup& setup, const plan::MemoryPlan& plan,
                             const std::vector<plan::Parameter>& parameters, const BudgetShortfall& shortfall) {
  return suggestions_text(setup, setup.control->world(), plan.on_device, shortfall,
                          offline_plan_with(setup, parameters));
}
void check_budget(const Setup& setup, const plan::MemoryPlan& plan, const std::vector<plan::Parameter>& parameters,
                  const plugin::Instance* communicator) {
  const int world = setup.control->world();
  const int local_world = setup.control->local_world();
  check_host_budget(setup.config, plan, local_world, plan_context_of(setup, communicator, world), [&](int64_t bytes) {
    return host_suggestions_text(setup, world, local_world, bytes, offline_plan_with(setup, parameters));
  });
  const int64_t budget = setup.config.memory().device_budget;
  const int64_t bytes = plan.max_budgeted_bytes();
  if (budget == 0 || bytes <= budget) return;
  const OfflinePlan offline(setup, parameters, world);
  const BudgetShortfall shortfall{budget, bytes, offline.context().activations.value_or(0)};
  fail_user(plan_over_budget_text(setup.config, offline, bytes, suggestions_text(setup, plan, parameters, shortfall)));
}

}  // namespace zr::host::job
