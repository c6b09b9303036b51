#include "job/job_plan.hpp"

#include <utility>

#include "job/device_state.hpp"
#include "job/inexact_collectives.hpp"
#include "job/job_checks.hpp"
#include "job/plan_inputs.hpp"

namespace zr::host::job {

namespace {
std::unique_ptr<const plugin::Instance> make_communicator(plugin::PluginHost& host, const plugin::ResolvedJob& job) {
  if (!job.communicator) return nullptr;
  return std::make_unique<plugin::Instance>(host, *job.communicator, job.config, table_of(*job.communicator));
}

std::vector<std::shared_ptr<const plugin::Instance>> make_tiers(plugin::PluginHost& host,
                                                                const plugin::ResolvedJob& job) {
  std::vector<std::shared_ptr<const plugin::Instance>> tiers;
  for (const plugin::Component& tier : job.tiers)
    tiers.push_back(std::make_shared<const plugin::Instance>(host, tier, job.config, table_of(tier)));
  return tiers;
}
}  // namespace

JobPlugins::JobPlugins(plugin::PluginHost& host, const plugin::ResolvedJob& job)
    : strategy(host, job.strategy, job.config, table_of(job.strategy)),
      optimizers(host, job),
      communicator(make_communicator(host, job)),
      tiers(make_tiers(host, job)) {}

plan::PlanInput job_plan_input(const plugin::ResolvedJob& job, const JobPlugins& plugins,
                               std::vector<plan::Parameter> parameters, const RankLocations& locations) {
  const plugin::Instance* const communicator = plugins.communicator.get();
  plan::PlanInput input = plan_input(job.config, plugins.optimizers, std::move(parameters), locations.world);
  add_tiers(input, job, plugins.tiers, locations.ranks_per_host,
            communicator_bytes(communicator, locations.world).value_or(0));
  input.hosts = locations.hosts;
  input.rounds_weights = rounds_weights(job.config, communicator);
  if (!locations.hosts.empty()) choose_sharing(input, job.config, communicator, locations.ordered);
  return input;
}

plan::MemoryPlan job_plan(const plugin::ResolvedJob& job, const JobPlugins& plugins, const plan::PlanInput& input,
                          bool has_device, const std::function<plan::MemoryPlan(const plan::PlanInput& input)>& make) {
  plan::MemoryPlan plan = located_plan(input, make, [&](plan::MemoryPlan& made) {
    locate_state(made, job.config, plugins.strategy, plugins.optimizers, plugins.communicator.get(), has_device);
  });
  plan.update_time = update_time(job.config, plan);
  return plan;
}

void check_plan(const plugin::ResolvedJob& job, const JobPlugins& plugins, const plan::MemoryPlan& plan) {
  const std::string strategy = job.strategy.table->id;
  check_strategy(plan, plugins.strategy);
  check_optimizers(plan, plugins.optimizers, strategy);
  check_local_gradients(job.config, plan, plugins.optimizers, plugins.strategy);
  check_offload(job.config, plan, strategy);
}

}  // namespace zr::host::job
