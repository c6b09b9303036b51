// The collectives of a training step that no rank runs, for `zeroth plan`.
#pragma once

#include <functional>

#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "plugin/plugin_selection.hpp"
#include "zr/abi/communicator.h"

namespace zr::host::job {

/// Receives a collective as the strategy submits it. Its lists and its label are valid during the call; its views have
/// addresses in the planned buffers, but no data.
using CollectiveSink = std::function<void(const zr_coll&)>;

enum class SimulatedStep { reduced_gradients, local_gradients };

/// Makes the calls of some steps to an instance of the job's strategy, as rank plan.rank of plan.input.world. `sink`
/// receives the collectives of the last one, in which the strategy knows the order of the parameters. Each module uses
/// its parameters once in forward, in the model's order, and once in backward. Collectives complete at once, and
/// buffers take memory only where the strategy writes to them. For a step with local gradients, `plan` has the
/// segments of all ranks (make_plan), and an instance of the optimizer makes the exchange, of zeros. Throws Error if a
/// plug-in fails, and what `sink` throws. [control]
void simulate_step(plugin::PluginHost& host, const plugin::ResolvedJob& job, const plan::MemoryPlan& plan,
                   SimulatedStep which, const CollectiveSink& sink);

}  // namespace zr::host::job
