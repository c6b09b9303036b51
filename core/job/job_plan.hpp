// From a job's plug-ins to its checked plan: the same path for a job that starts, and for one that is only planned.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "job/optimizers.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "plugin/plugin_selection.hpp"

namespace zr::host::job {

/// The instances of a job's plug-ins, created but not opened. Immutable.
struct JobPlugins {
  /// Both arguments outlive the object. [control]
  JobPlugins(plugin::PluginHost& host, const plugin::ResolvedJob& job);

  const plugin::Instance strategy;  // of the plan's part 0
  const Optimizers optimizers;
  const std::unique_ptr<const plugin::Instance> communicator;        // null for one rank
  const std::vector<std::shared_ptr<const plugin::Instance>> tiers;  // ShardedState opens them
};

/// The hosts of the ranks of a job.
struct RankLocations {
  int world;
  int ranks_per_host;      // of this host; the largest number if the plan is for all
  std::vector<int> hosts;  // number of ranks of each; empty: unknown, as if all were on one
  bool ordered = true;     // the ranks are numbered host by host
  bool one_host() const { return hosts.size() <= 1 && ranks_per_host == world; }
};

/// The input of the job's plan. Throws UserError as plan_input() and add_tiers() do.
plan::PlanInput job_plan_input(const plugin::ResolvedJob& job, const JobPlugins& plugins,
                               std::vector<plan::Parameter> parameters, const RankLocations& locations);
/// The plan that `make` makes, with the location of the training state. has_device: the process has opened the job's
/// device.
plan::MemoryPlan job_plan(const plugin::ResolvedJob& job, const JobPlugins& plugins, const plan::PlanInput& input,
                          bool has_device, const std::function<plan::MemoryPlan(const plan::PlanInput& input)>& make);
/// Throws UserError if a plug-in of the job does not support its plan, as the functions of job_checks.hpp do.
void check_plan(const plugin::ResolvedJob& job, const JobPlugins& plugins, const plan::MemoryPlan& plan);

}  // namespace zr::host::job
