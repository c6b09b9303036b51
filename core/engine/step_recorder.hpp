// Where a step's time and bytes went: the phases of the run's record, spans of the trace, rows of metrics.jsonl.
#pragma once

#include <chrono>
#include <functional>

#include "base/trace.hpp"
#include "comm/comm_volume.hpp"
#include "engine/gradient_flow.hpp"
#include "engine/run_recorder.hpp"
#include "engine/sharded_state.hpp"
#include "engine/step_context.hpp"
#include "engine/step_sync.hpp"
#include "engine/training_progress.hpp"
#include "offload/activation_store.hpp"

namespace zr::host {

/// Training thread only.
class StepRecorder {
 public:
  /// Refers to all; trace: null if there is none.
  StepRecorder(const StepContext& context, const ShardedState& state, RunRecorder& recorder, Trace* trace);
  StepRecorder(const StepRecorder&) = delete;
  /// Their waits count from now on; null: no longer.
  void set_activations(const ActivationStore* activations) { activations_ = activations; }

  /// Adds the time since the last mark to a phase.
  void lap(Phase phase);
  /// What was done since the last mark belongs to no step.
  void restart_clock();
  /// What was done since then was a checkpoint, which no step's time has.
  void lap_checkpoint();
  /// What `work` communicates belongs to no step.
  void exclude(const std::function<void()>& work);
  /// A step was made: gathers its bytes, ends its time, and writes its row. Collective.
  void step(const GlobalStats& global, double rate, const TrainingProgress& progress);
  /// Weights hash and bytes of all ranks, for summary.json. Collective.
  void record_totals(const std::string& hash);
  /// How much of the run's communication and reading was under way beside computation.
  Overlap overlap(const GradientFlow& gradients, const NormBlocks& norm) const;

  /// This rank's, with that of the sessions before.
  CommVolume volume() const;
  /// Continues the counts of sessions before; what was communicated up to here belongs to no step.
  void continue_from(const CommVolume& communication, const Overlap& overlap);

 private:
  TierWaits waits() const;

  const StepContext& context_;
  const ShardedState& state_;
  RunRecorder& recorder_;
  Trace* const trace_;
  const ActivationStore* activations_ = nullptr;
  std::chrono::steady_clock::time_point mark_, step_start_;
  TierWaits waited_;                  // up to the last lap
  int64_t recorded_bytes_ = 0;        // of all ranks up to the last step
  int64_t excluded_bytes_ = 0;        // of this rank
  CommVolume earlier_communication_;  // of the sessions before, this rank
  Overlap overlap_before_{};
};

}  // namespace zr::host
