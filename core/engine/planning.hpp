// What a job's plug-ins plan for a list of parameters: for the job that starts, and for people, without a job.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "plugin/plugin_selection.hpp"

namespace zr::host {

/// "strategy.<id>", the table an instance is made with.
std::string table_of(const Component& component);
/// What a strategy is asked: parameters with their optimizer groups, types, states. Tells `optimizer` its groups, so
/// once an instance. Throws Failure(user) for a group that matches no parameter.
PlanInput plan_input(const JobConfig& config, const Instance& optimizer, std::vector<Parameter> parameters, int world);
/// ZR_ELEMENTWISE and so on.
uint32_t granularity_of(const Instance& optimizer);
/// Where parts of the state may stand, and what [offload] asks for. `tiers`: of the job, not open. `local`: ranks of a
/// host; `other_bytes`: host memory that each of them takes for other things.
void add_tiers(PlanInput& input, const ResolvedJob& job, const std::vector<std::unique_ptr<Instance>>& tiers, int local,
               int64_t other_bytes, bool elementwise);
/// Throws Failure(user) where [offload] asks for what this plan has not got.
void check_offload(const JobConfig& config, const MemoryPlan& plan, const std::string& strategy);
/// What a plan of this job is shown with. `communicator`: null for one rank.
PlanContext plan_context_of(const ResolvedJob& job, const Instance* communicator, int world);
/// Host memory of `local` ranks on one host: tiers, the communicator's, copies for checkpoints.
int64_t host_bytes(const MemoryPlan& plan, int local, std::optional<int64_t> communicator, bool snapshot);
/// Throws Failure(user) with the plan if that is more than memory.host_budget.
void check_host_budget(const JobConfig& config, const MemoryPlan& plan, int local, const PlanContext& context);
/// Ranks that are all on one host, and have no device_budget of their own, have their weights once.
bool shares_weights(const JobConfig& config, const std::optional<Component>& communicator, int world);
/// Checkpoints are written from a copy: checkpoint.async, where the host knows of any.
bool snapshots(const JobConfig& config);
/// Asks that instance of a strategy.
StrategyPlan strategy_plan(const Instance& strategy);
/// Host memory that the communicator takes when it opens, and the host beside it; nothing if the plug-in does not say.
std::optional<int64_t> communicator_bytes(const Instance* communicator, int world);

/// Plans a job that is not started: no control plane, nothing opened. [control]
class Planner {
 public:
  /// `one_host`: its ranks are known to be on one, as those that `zeroth train` starts.
  Planner(const ResolvedJob& job, const std::vector<Parameter>& parameters, int world, bool one_host = false);
  ~Planner();
  MemoryPlan plan(int rank) const;  // that rank alone
  /// The most that any rank holds; of large worlds, rank 0: their ranks differ by less than a leaf a bucket.
  int64_t max_bytes() const;
  /// What is known beside the plan: activations, if an earlier run of this job measured them.
  PlanContext context() const;
  std::string title() const;  // "plan: ", strategy, " + ", optimizer

 private:
  ResolvedJob job_;
  Ledger ledger_;
  ThreadPool pool_{1};
  PluginHost host_;
  std::unique_ptr<Instance> strategy_, optimizer_, communicator_;
  std::vector<std::unique_ptr<Instance>> tiers_;
  PlanInput input_;
};

/// Why a job of that plan does not start: its budget, the plan of rank 0, and what could be changed.
std::string plan_over_budget_text(const JobConfig& config, const Planner& planner, int64_t max_bytes,
                                  const std::string& suggestions);

}  // namespace zr::host
