// Measures the time and bytes of each step, and writes them to the run's phases, the trace, and metrics.jsonl.
#pragma once

#include <chrono>
#include <functional>

#include "base/trace.hpp"
#include "comm/comm_volume.hpp"
#include "engine/gradient_flow.hpp"
#include "engine/step_sync.hpp"
#include "engine/training_progress.hpp"
#include "job/step_context.hpp"
#include "offload/activation_store.hpp"
#include "run/run_log.hpp"
#include "state/sharded_state.hpp"

namespace zr::host::engine {

class OptimizerUpdate;

/// Training thread only.
class StepTimer {
 public:
  /// Keeps references to all arguments. trace: null: no trace. activations: null: saved tensors stay on the device.
  StepTimer(const job::StepContext& context, const state::ShardedState& state, run::RunLog& log, Trace* trace,
            const offload::ActivationStore* activations);
  StepTimer(const StepTimer&) = delete;

  /// Adds the time since the last call of lap() or restart_clock() to a phase.
  void lap(run::Phase phase);
  /// Discards the time since the last call of lap() or restart_clock(): it belongs to no step.
  void restart_clock();
  /// Adds the time since the last call of lap() or restart_clock() to Phase::checkpoint, and to no step.
  void lap_checkpoint();
  /// Runs `work`; the bytes that it communicates belong to no step.
  void exclude(const std::function<void()>& work);
  /// Call after each step: collects the bytes of all ranks, ends the step's time, and writes its row. Collective.
  void step(const GlobalStats& global, double rate, const TrainingProgress& progress);
  /// Records the weights hash and the bytes of all ranks for summary.json. Collective.
  void record_totals(const std::string& hash);
  /// Counts how much of the run's communication and reading overlapped with computation.
  /// update: null: without the share of updates that began early.
  run::Overlap overlap(const GradientFlow& gradients, const NormBlocks& norm, const OptimizerUpdate* update) const;

  /// The communication volume of this rank, including the previous sessions of the run.
  comm::CommVolume volume() const;
  /// Continues the counts of the previous sessions. The bytes that this session has communicated so far belong to no
  /// step.
  void continue_from(const comm::CommVolume& communication, const run::Overlap& overlap);

 private:
  void observe_activations();
  offload::TierWaits waits() const;

  const job::StepContext& context_;
  const state::ShardedState& state_;
  run::RunLog& log_;
  Trace* const trace_;
  const offload::ActivationStore* const activations_;
  std::chrono::steady_clock::time_point mark_, step_start_;
  offload::TierWaits waited_;               // at the last call of lap() or restart_clock()
  int64_t recorded_bytes_ = 0;              // of all ranks, up to the last step
  int64_t excluded_bytes_ = 0;              // of this rank; they belong to no step
  comm::CommVolume earlier_communication_;  // of this rank, in the previous sessions
  run::Overlap overlap_before_{};
};

}  // namespace zr::host::engine
