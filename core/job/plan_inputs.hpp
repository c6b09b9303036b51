// What a job and its plug-ins give to a plan, for a job that starts, and for `zeroth plan`, which starts none.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "control/control.hpp"
#include "job/optimizers.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "plugin/plugin_selection.hpp"

namespace zr::host::job {

/// "strategy.<id>": the configuration table of an instance.
std::string table_of(const plugin::Component& component);
/// The strategy's input: parameters with their groups and optimizers, dtypes, the descriptions of the optimizers.
/// Throws UserError if a group pattern matches no parameter, and as describe_parameters() does.
plan::PlanInput plan_input(const config::JobConfig& config, const Optimizers& optimizers,
                           std::vector<plan::Parameter> parameters, int world);
/// A warning for each group that no parameter belongs to, because earlier groups match its parameters too.
/// `parameters`: those of plan_input().
std::vector<std::string> group_warnings(const std::vector<config::GroupConfig>& groups,
                                        const std::vector<plan::Parameter>& parameters);
/// Adds the tiers and the requests of [offload] to `input`. `tiers`: those of the job, not open. `other_bytes`: bytes
/// of host memory that each of these ranks uses for other purposes.
void add_tiers(plan::PlanInput& input, const plugin::ResolvedJob& job,
               const std::vector<std::shared_ptr<const plugin::Instance>>& tiers, int ranks_per_node,
               int64_t other_bytes);
/// Throws UserError if [offload] requests something that this plan does not support.
void check_offload(const config::JobConfig& config, const plan::MemoryPlan& plan, const std::string& strategy);
/// MemoryPlan::update_time of a plan.
std::string update_time(const config::JobConfig& config, const plan::MemoryPlan& plan);
/// The values that MemoryPlan::text() prints beside a plan of this job. `communicator`: null for one rank.
plan::PlanContext plan_context_of(const plugin::ResolvedJob& job, const plugin::Instance* communicator, int world);
/// Bytes of host memory of `ranks_per_node` ranks on one node: tiers, communicators, copies for checkpoints.
int64_t host_bytes(const plan::MemoryPlan& plan, int ranks_per_node, std::optional<int64_t> communicator,
                   bool snapshot);
/// Throws UserError with the plan if host_bytes() exceeds memory.host_budget. `suggest`: the text after it, from these
/// bytes; "" or null: none.
void check_host_budget(const config::JobConfig& config, const plan::MemoryPlan& plan, int ranks_per_node,
                       const plan::PlanContext& context, const std::function<std::string(int64_t bytes)>& suggest = {});
/// The number of ranks of each host. Ranks that are not numbered host by host count as if each was on a host of its
/// own.
std::vector<int> ranks_of_hosts(const control::Control& control);

/// Sets whether the ranks of each host share one copy of the weights, or why they do not. `input`: its hosts are set.
/// ordered: the ranks are numbered host by host. The communicator may be null.
void choose_sharing(plan::PlanInput& input, const config::JobConfig& config, const plugin::Instance* communicator,
                    bool ordered);
/// True if checkpoints are written from a copy in host memory: checkpoint.async is true and checkpoint.dir is set.
bool snapshots(const config::JobConfig& config);
/// Calls plan() of this strategy, which must outlive the result. Throws Error if the strategy does not accept CPU
/// memory.
plan::StrategyPlan strategy_plan(const plugin::Instance& strategy);
/// Lets a new instance of the strategy plan a part of `plan`, which another instance has planned. Before bind().
void describe_part(const plugin::Instance& strategy, const plan::MemoryPlan& plan, uint32_t part);
/// The device types whose memory the strategy accepts, with streams; bit i: type i. 0: it accepts no streams.
uint64_t stream_types_of(const plugin::Instance& strategy);
/// Whether the strategy accepts steps whose gradients are not reduced over ranks.
bool accepts_local_gradients(const plugin::Instance& strategy);
/// Bytes of host memory that the communicator allocates when it opens, plus the host's staging buffer for it; nullopt
/// if the plug-in does not report them.
std::optional<int64_t> communicator_bytes(const plugin::Instance* communicator, int world);

/// A PluginHost that also offers "zr.host.async/1" and "zr.host.machine/1", which need no job.
class EngineHost : public plugin::PluginHost {
 public:
  /// See PluginHost.
  EngineHost(Ledger& ledger, ThreadPool& pool);
};

/// The title of a plan: "plan: ", strategy, " + ", optimizers.
std::string plan_title(const plugin::ResolvedJob& job, const Optimizers& optimizers);

}  // namespace zr::host::job
