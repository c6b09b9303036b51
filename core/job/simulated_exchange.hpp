// The optimizer's exchange in a step with local gradients that no rank runs, for `zeroth plan`.
#pragma once

#include "job/simulated_memory.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "plugin/plugin_selection.hpp"
#include "zr/abi/communicator.h"

namespace zr::host::job {

/// Calls exchange() of a new instance of the job's optimizer, as rank plan.rank, for all trainable parameters, long
/// after its warm-up. `plan` has the plans of all ranks (make_plan). comm: receives the collectives. memory: for
/// gradients and states, which are zero at first. Throws Error if the plug-in fails, or if the optimizer never needs
/// local gradients. [control]
void simulate_exchange(plugin::PluginHost& host, const plugin::ResolvedJob& job, const plan::MemoryPlan& plan,
                       const zr_comm_ref& comm, SimulatedMemory& memory);

}  // namespace zr::host::job
