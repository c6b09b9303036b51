// A job before its training state is allocated: plug-ins, the plan of this rank, the communicator, and a check that all
// ranks have the same set-up.
#pragma once

#include <memory>
#include <vector>

#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "base/trace.hpp"
#include "comm/comm_runtime.hpp"
#include "control/job_services.hpp"
#include "job/engine_name.hpp"
#include "job/job_plan.hpp"
#include "job/plan_inputs.hpp"
#include "job/setup.hpp"
#include "job/step_context.hpp"
#include "model/model.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/mutex.hpp"

namespace zr::host::job {

/// Training thread only; the members have their own thread rules. Immutable.
struct StartedJob {
  /// Creates the plug-ins, plans, checks the plan, opens the communicator, and compares the set-ups of the ranks. Does
  /// not allocate the training state. Keeps a reference to the model. trace: that of the previous session, which this
  /// one continues; null: a new trace if job.trace is true. Collective.
  StartedJob(Setup setup, model::Model& model, std::shared_ptr<Trace> trace);
  StartedJob(const StartedJob&) = delete;

  const config::JobConfig& config() const { return setup.config; }
  int rank() const { return setup.control->rank(); }
  int world() const { return setup.control->world(); }

  const Setup setup;
  EngineName name;
  Ledger ledger;
  ThreadPool pool;
  EngineHost host;
  const std::shared_ptr<Trace> trace;  // outlives the objects that record spans; null: no trace
  control::JobServices services;
  const JobPlugins plugins;
  plan::MemoryPlan plan;
  const std::unique_ptr<const plugin::Instance> strategy_of_fp32;  // of its part 1; null: it has one part
  StrategyParts strategy_parts;
  comm::CommRuntime comm;
  DeviceMemory* const device;  // see RankContext
  RecursiveMutex use;          // see StepContext
  const StepContext context;
};

}  // namespace zr::host::job
