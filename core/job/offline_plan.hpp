// Plans a job that is not started, for `zeroth plan` and for suggestions.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "job/budget_suggestions.hpp"
#include "job/host_traffic.hpp"
#include "job/inexact_collectives.hpp"
#include "job/job_plan.hpp"
#include "job/plan_inputs.hpp"

namespace zr::host::job {

/// Plans a job that is not started: without a control plane; its plug-ins are created but not opened. [control]
class OfflinePlan {
 public:
  /// `hosts`: where the ranks are; empty: unknown.
  OfflinePlan(const plugin::ResolvedJob& job, const std::vector<plan::Parameter>& parameters, int world,
              const HostSizes& hosts = {});
  ~OfflinePlan();
  plan::MemoryPlan plan(int rank) const;  // of this rank only
  /// The plan of rank 0 with the segments of all ranks, which a step with local gradients needs. Its cost grows with
  /// the number of ranks.
  plan::MemoryPlan plan_with_segments() const;
  /// The largest number of bytes on any rank that memory.device_budget limits (MemoryPlan::budgeted_bytes). With more
  /// than 16 ranks it is that of rank 0, because ranks then differ by less than one norm block per bucket.
  int64_t max_bytes() const;
  /// See job::host_bytes().
  int64_t host_bytes(int ranks_per_node) const;
  /// See plan_context_of(); activations are known if an earlier run of this job measured them.
  plan::PlanContext context() const;
  std::string title() const;  // see plan_title()
  /// The flags of the job's inexact collectives.
  InexactCollectives inexact_collectives() const;
  /// Whether the strategy may round weights: then it may gather them more often.
  bool rounds_weights() const { return input_.rounds_weights; }
  /// What the ranks of `hosts` transfer in one step with reduced gradients (see simulate_step), for each of these
  /// flags. Throws Error if a plug-in fails.
  std::vector<HostTraffic> traffic(const std::vector<InexactCollectives>& choices);
  /// What the ranks of `hosts` transfer in one step with local gradients, whose collectives are all exact. Empty
  /// without an optimizer that needs local gradients.
  HostTraffic local_traffic();

 private:
  const plugin::ResolvedJob job_;
  Ledger ledger_;
  ThreadPool pool_{1};
  EngineHost host_;
  JobPlugins plugins_;
  RankLocations locations_;
  plan::PlanInput input_;
};

/// The error for a plan that exceeds memory.device_budget: the budget, the plan of rank 0, and the suggested changes.
std::string plan_over_budget_text(const config::JobConfig& config, const OfflinePlan& offline, int64_t max_bytes,
                                  const std::string& suggestions);

/// Plans the job with a suggestion; throws Error if the changed job is invalid.
using MakeOfflinePlan = std::function<std::unique_ptr<OfflinePlan>(const Suggestion& change)>;
/// The suggestions for a job with this shortfall, as text. on_device: the job keeps training state on a device; then
/// changes that move all of it to host memory are suggested only if nothing else fits.
std::string suggestions_text(const plugin::ResolvedJob& job, int ranks, bool on_device,
                             const BudgetShortfall& shortfall, const MakeOfflinePlan& make);

/// The suggestions for a job that exceeds memory.host_budget with `bytes` per node, as text that follows another
/// remedy; "" if there are none. A change that exceeds memory.device_budget is not suggested.
std::string host_suggestions_text(const plugin::ResolvedJob& job, int ranks, int ranks_per_node, int64_t bytes,
                                  const MakeOfflinePlan& make);

}  // namespace zr::host::job
