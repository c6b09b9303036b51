// Detects changes of weights between updates: in-place writes of the program, which are copied to the masters, and
// weights that differ between ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "engine/step_timer.hpp"
#include "engine/training_progress.hpp"
#include "engine/weight_digest.hpp"
#include "engine/weight_flow.hpp"
#include "engine/weight_samples.hpp"
#include "job/step_context.hpp"
#include "run/run_log.hpp"
#include "state/sharded_state.hpp"

namespace zr::host::engine {

/// Training thread only.
class WeightMonitor {
 public:
  /// The objects that the monitor reads and reports to; all outlive it.
  struct Parts {
    state::ShardedState& state;
    WeightFlow& flow;
    run::RunLog& log;
    StepTimer& step_timer;
    const TrainingProgress& progress;
  };
  /// Samples the weights as they are. Refers to all of it. Collective.
  WeightMonitor(const job::StepContext& context, const Parts& parts);
  WeightMonitor(const WeightMonitor&) = delete;

  /// Copies the program's in-place writes to weights since the last call to the masters. Every call that needs the
  /// masters calls this first, under every strategy, so a write that all ranks undo before has no effect.
  void collect_writes();
  /// A parameter to which the program has written since the last collect_writes(), which collects these writes still;
  /// none: it has not.
  std::optional<uint32_t> written_parameter();
  /// Call when this rank's parts of new weights are complete: the strategy sends them. flags: ZR_USE_*. Collective.
  void publish_weights(bool frozen_too, uint32_t flags = 0);
  /// Call when the weights of these parameters were loaded from a file: the strategy sends them. Collective.
  void publish_loaded(const std::vector<uint32_t>& params);
  /// Compares weights between ranks, after collect_writes(). Call before the program or a file gets their values.
  /// Collective.
  void compare();
  /// Compares weights between ranks without collect_writes(), for calls that do not use the masters: a write that all
  /// ranks undo before the next collect_writes() leaves the masters as they were. Collective.
  void compare_weights();
  /// Forgets the program's writes since the last collect_writes(): the weights have their earlier values again.
  void discard_writes();
  /// Call before and after engine.set() stores a parameter's new values. The strategy sends them at once; but if every
  /// rank has its own copy of all weights, all of which engine.set() stores, publish_replacements() does this once for
  /// many calls. Collective.
  void begin_replacement();
  void end_replacement(uint32_t param);
  /// Call before the strategy is called for a backward, a step or an evaluation: it is notified of the weights that
  /// engine.set() has replaced. If weights differ between ranks, throws on all of them, and changes nothing.
  /// Collective.
  void publish_replacements();
  /// Whether collect_writes() has copied a write to a master since the last call.
  bool take_collected() { return std::exchange(collected_, false); }
  WeightDigest& digest() { return digest_; }
  /// This rank's part of a step's exchange, for digest().compare(). Call collect_writes() before.
  WeightDigest::Digest next_digest() { return digest_.next(parts_.flow.take_writes()); }

  /// Call after a checkpoint of this step was saved: the first later write to weights before the next step is logged,
  /// because the checkpoint does not contain it. Logs at most one write per session, and none if weights are on disk.
  void hash_saved_weights();
  void clear_saved_hashes() { saved_hashes_.clear(); }  // call when a step was completed: writes are no longer logged

 private:
  void compare_before(int64_t step);
  void compare_digests(int64_t step);
  void note_writes();
  void record_write(uint32_t param);
  void warn_if_unsaved(uint32_t param);

  const job::StepContext& context_;
  const Parts parts_;
  WeightDigest digest_;
  std::set<uint32_t> written_;  // parameters that the model has reported since the last collect_writes()
  WeightSamples samples_;
  std::vector<uint64_t> saved_hashes_;  // by slice: hash of the weights in this step's checkpoint; empty: none saved
  bool collected_ = false;              // a write was copied to a master
  bool warned_unsaved_ = false;         // whether a write after a checkpoint was logged
  const bool has_own_copies_;           // every rank holds all weights in memory that it shares with no other
  bool replaced_ = false;               // engine.set() replaced weights that the strategy has not sent
};

}  // namespace zr::host::engine
