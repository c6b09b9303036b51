// What changes weights between updates: writes of the program, which masters follow, and faults, which ranks compare.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/run_recorder.hpp"
#include "engine/sharded_state.hpp"
#include "engine/step_context.hpp"
#include "engine/training_progress.hpp"
#include "engine/weight_digest.hpp"
#include "engine/weight_flow.hpp"
#include "engine/weight_samples.hpp"

namespace zr::host {

/// Training thread only.
class WeightMonitor {
 public:
  /// What the monitor reads and reports to; all outlive it.
  struct Parts {
    ShardedState& state;
    WeightFlow& flow;
    RunRecorder& recorder;
    const TrainingProgress& progress;
  };
  /// Samples the weights as they are. Refers to all of it.
  WeightMonitor(const StepContext& context, const Parts& parts);
  WeightMonitor(const WeightMonitor&) = delete;

  /// Masters become what the program wrote to weights in place since the last call. They follow here, at the next call
  /// that needs them, under every strategy: a write that is undone before leaves no trace.
  void take_written();
  /// The program wrote to weights since then.
  bool has_written() const;
  /// New weights are complete in this rank's parts: the strategy sends them. Collective.
  void publish();
  /// Before weights leave the engine, for a file or a hash: compares them between ranks. Collective.
  void compare();
  /// engine.set() replaced a parameter's values.
  void replaced(uint32_t param);
  WeightDigest& digest() { return digest_; }

  /// Writes from here on, until the next step, are missing in the checkpoint of this step: the first is logged. Not of
  /// weights on disk, and not once one was logged.
  void remember_saved();
  void forget_saved() { saved_.clear(); }  // there is no such checkpoint any more

 private:
  void report(uint32_t param);
  void report_unsaved(uint32_t param);

  const StepContext& context_;
  const Parts parts_;
  WeightDigest digest_;
  WeightSamples samples_;
  std::vector<uint64_t> saved_;  // hashes by slice, of the checkpoint that this step saved; empty: of none
  bool unsaved_write_ = false;   // a write behind a checkpoint was reported
};

}  // namespace zr::host
