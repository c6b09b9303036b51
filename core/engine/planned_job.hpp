// A job before it takes memory: its plug-ins, the plan of this rank, and the communicator, compared between the ranks.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "base/trace.hpp"
#include "comm/comm_runtime.hpp"
#include "control/job_services.hpp"
#include "engine/engine_name.hpp"
#include "engine/setup.hpp"
#include "engine/step_context.hpp"
#include "model/model.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"

namespace zr::host {

/// Training thread only; members have their own rules. Immutable as a whole, but for tiers, which are handed on.
struct PlannedJob {
  /// Collective: creates the plug-ins, plans, checks the plan, opens the communicator, and compares the ranks' set-ups.
  /// Takes no memory for the training state. Refers to the model. trace: of the session before, which this one
  /// continues; null: one of its own, if job.trace asks for it.
  PlannedJob(Setup setup, Model& model, std::shared_ptr<Trace> trace);
  PlannedJob(const PlannedJob&) = delete;

  const JobConfig& config() const { return setup.config; }
  int rank() const { return setup.control->rank(); }
  int world() const { return setup.control->world(); }

  const Setup setup;
  EngineName name;
  Ledger ledger;
  ThreadPool pool;
  PluginHost host;
  const std::shared_ptr<Trace> trace;  // outlives who draws it
  JobServices services;
  const Instance strategy, optimizer;
  const std::unique_ptr<const Instance> communicator;  // null for one rank
  std::vector<std::unique_ptr<Instance>> tiers;        // not open; until ShardedState has them
  const MemoryPlan plan;
  CommRuntime comm;
  std::recursive_mutex use;
  const StepContext context;
};

}  // namespace zr::host
