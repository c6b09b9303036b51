// engine.refresh(): the old session saves its state to a private checkpoint and hands over the objects that do not
// depend on the list of parameters; the new session loads the checkpoint.
#pragma once

#include <functional>
#include <vector>

#include "engine/checkpointer.hpp"
#include "engine/refresh_state.hpp"
#include "engine/step_sync.hpp"
#include "engine/training_parts.hpp"
#include "job/step_context.hpp"

namespace zr::host::engine {

/// Training thread only; all methods are collective.
class ModelRefresh {
 public:
  /// Keeps references to all arguments and parts.
  ModelRefresh(const job::StepContext& context, const TrainingParts& parts, Checkpointer& checkpointer)
      : context_(context), parts_(parts), checkpointer_(checkpointer) {}
  ModelRefresh(const ModelRefresh&) = delete;

  /// Checks that training can continue with the parameters that `look` returns, and that all ranks made the same
  /// change. Returns false if nothing changed on any rank. A failure on any rank, also of `look`, is thrown on all
  /// ranks, before anything changes.
  bool compare_changes(const std::function<std::vector<plan::Parameter>(ParameterChange&)>& look,
                       ParameterChange& change);
  /// Saves the state for the next session, and fills in the members of RefreshState that this object can provide; the
  /// caller sets the others. A failure changes nothing.
  RefreshState hand_over(ParameterChange change, const NormBlocks& norm, const OptimizerUpdate& update);
  /// Called on the new session: loads the checkpoint of `before`, continues its counters, and deletes the checkpoint.
  void continue_from(const RefreshState& before);
  /// True after hand_over() succeeded: the next session continues the run.
  bool handed_over() const { return handed_over_; }

 private:
  // Runs `work`, which does not communicate; an exception on one rank is an error on all ranks.
  void prepare_change(const std::function<void()>& work);

  const job::StepContext& context_;
  const TrainingParts parts_;
  Checkpointer& checkpointer_;
  bool handed_over_ = false;
};

}  // namespace zr::host::engine
