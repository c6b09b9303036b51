#include "job/offline_plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.hpp"
#include "job/job_checks.hpp"
#include "job/simulated_step.hpp"

namespace zr::host::job {

namespace {
RankLocations locations_of(int world, const HostSizes& hosts) {
  return {world, hosts.empty() ? world : *std::max_element(hosts.begin(), hosts.end()), hosts};
}

constexpr int kFewRanks = 16;  // of a job whose ranks are all planned
}  // namespace

OfflinePlan::OfflinePlan(const plugin::ResolvedJob& job, const std::vector<plan::Parameter>& parameters, int world,
                         const HostSizes& hosts)
    : job_(job),
      host_(ledger_, pool_),
      plugins_(host_, job_),
      locations_(locations_of(world, hosts)),
      input_(job_plan_input(job_, plugins_, parameters, locations_)) {}

OfflinePlan::~OfflinePlan() = default;

plan::MemoryPlan OfflinePlan::plan(int rank) const {
  plan::MemoryPlan plan = job_plan(job_, plugins_, input_, false, [&](const plan::PlanInput& input) {
    return plan_of_rank(input, rank, strategy_plan(plugins_.strategy));
  });
  const bool has_costs = std::any_of(input_.descriptions.begin(), input_.descriptions.end(),
                                     [](const auto& d) { return d.cost > 0 || d.granularity != ZR_ELEMENTWISE; });
  for (int other = 0; other < (input_.world <= kFewRanks ? input_.world : 0); ++other)
    if (other != rank && has_costs)
      plan.largest_update_share = std::max(
          plan.largest_update_share, plan_of_rank(input_, other, strategy_plan(plugins_.strategy)).update_share());
  plan.knows_all_shares = input_.world <= kFewRanks;
  check_plan(job_, plugins_, plan);
  job::inexact_collectives(job_.config, plan, plugins_.communicator.get(), locations_.one_host(), false);
  return plan;
}

int64_t OfflinePlan::max_bytes() const {
  int64_t max_bytes = 0;
  for (int rank = 0; rank < (input_.world <= kFewRanks ? input_.world : 1); ++rank)
    max_bytes = std::max(max_bytes, plan(rank).budgeted_bytes());
  return max_bytes;
}

int64_t OfflinePlan::host_bytes(int ranks_per_node) const {
  const plan::PlanContext context = this->context();
  return job::host_bytes(plan(0), ranks_per_node, context.communicator, context.snapshot);
}

plan::PlanContext OfflinePlan::context() const {
  return plan_context_of(job_, plugins_.communicator.get(), input_.world);
}

std::string plan_over_budget_text(const config::JobConfig& config, const OfflinePlan& offline, int64_t max_bytes,
                                  const std::string& suggestions) {
  const config::Setting<int64_t>& budget = config.memory().device_budget;
  const plan::MemoryPlan plan = offline.plan(0);
  return fmt::format("memory.device_budget is {} ({}), but the {} up to {} per rank, without activations\n{}{}",
                     bytes_text_beside(budget, max_bytes), budget.origin.text(),
                     plan.in_host_memory() ? "weights on the device take" : "plan takes",
                     bytes_text_beside(max_bytes, budget), plan.text(offline.title(), offline.context()), suggestions);
}

std::string suggestions_text(const plugin::ResolvedJob& job, int ranks, bool on_device,
                             const BudgetShortfall& shortfall, const MakeOfflinePlan& make) {
  const auto fitting = [&](bool keeps_on_device) {
    return fitting_suggestions(job, ranks, shortfall, [&](const Suggestion& change) -> std::optional<int64_t> {
      try {
        const std::unique_ptr<OfflinePlan> offline = make(change);
        if (keeps_on_device && offline->plan(0).in_host_memory()) return {};
        return offline->max_bytes();
      } catch (const Error&) {
        return {};  // the changed job is invalid
      }
    });
  };
  std::vector<Suggestion> suggestions = fitting(on_device);
  if (!suggestions.empty() || !on_device) return text_of(suggestions, shortfall);
  suggestions = fitting(false);
  return text_of(suggestions, shortfall) +
         (suggestions.empty() ? "" : "\n  (each moves the training state to host memory, where the CPU updates it)");
}

std::string host_suggestions_text(const plugin::ResolvedJob& job, int ranks, int ranks_per_node, int64_t bytes,
                                  const MakeOfflinePlan& make) {
  const int64_t device_budget = job.config.memory().device_budget;
  const BudgetShortfall shortfall{job.config.memory().host_budget, bytes, 0};
  const auto required = [&](const Suggestion& change) -> std::optional<int64_t> {
    try {
      const std::unique_ptr<OfflinePlan> offline = make(change);
      if (device_budget > 0 && offline->max_bytes() > device_budget) return {};
      return offline->host_bytes(ranks_per_node);
    } catch (const Error&) {
      return {};  // the changed job is invalid
    }
  };
  const std::vector<Suggestion> suggestions = fitting_host_suggestions(job, ranks, shortfall, required);
  return suggestions.empty() ? "" : "\n" + text_of(suggestions, shortfall);
}

plan::MemoryPlan OfflinePlan::plan_with_segments() const {
  return make_plan(input_, 0, strategy_plan(plugins_.strategy));
}

InexactCollectives OfflinePlan::inexact_collectives() const {
  return job::inexact_collectives(job_.config, plan(0), plugins_.communicator.get(), locations_.one_host(), false);
}

std::vector<HostTraffic> OfflinePlan::traffic(const std::vector<InexactCollectives>& choices) {
  std::vector<HostTraffic> traffic(choices.size());
  if (!plugins_.communicator) return traffic;
  const plan::MemoryPlan rank_0 = plan(0);
  std::vector<TrafficCounter> counters;
  for (const InexactCollectives& flags : choices)
    counters.emplace_back(*plugins_.communicator, locations_.hosts, flags);
  simulate_step(host_, job_, rank_0, SimulatedStep::reduced_gradients, [&](const zr_coll& coll) {
    for (TrafficCounter& counter : counters) counter.add(coll);
  });
  std::transform(counters.begin(), counters.end(), traffic.begin(), [](const TrafficCounter& c) { return c.sum(); });
  return traffic;
}

HostTraffic OfflinePlan::local_traffic() {
  if (!plugins_.communicator || !input_.exchange_plan) return {};
  const plan::MemoryPlan rank_0 = plan_with_segments();
  check_strategy(rank_0, plugins_.strategy);
  TrafficCounter counter(*plugins_.communicator, locations_.hosts, {});
  simulate_step(host_, job_, rank_0, SimulatedStep::local_gradients, [&](const zr_coll& coll) { counter.add(coll); });
  return counter.sum();
}

std::string OfflinePlan::title() const { return plan_title(job_, plugins_.optimizers); }

}  // namespace zr::host::job
