// engine.refresh(): the old session saves its state to a private checkpoint and hands over what does not depend on the
// list of parameters; the new session loads it.
#pragma once

#include <functional>
#include <vector>

#include "engine/checkpointer.hpp"
#include "engine/refresh_state.hpp"
#include "engine/step_context.hpp"
#include "engine/step_sync.hpp"
#include "engine/training_parts.hpp"

namespace zr::host {

/// Training thread only; all methods are collective.
class ModelRefresh {
 public:
  /// Refers to all of it.
  ModelRefresh(const StepContext& context, const TrainingParts& parts, Checkpointer& checkpointer)
      : context_(context), parts_(parts), checkpointer_(checkpointer) {}
  ModelRefresh(const ModelRefresh&) = delete;

  /// Checks that training can continue with the parameters that `look` finds, and that all ranks want it. False if
  /// nothing changed on any rank. A failure on any rank, of `look` too, is thrown on all, before anything changes.
  bool agree_on_change(const std::function<std::vector<Parameter>(ParameterChange&)>& look, ParameterChange& change);
  /// Saves the state for the session that continues, and fills in what this object knows of it. A failure changes
  /// nothing.
  RefreshState hand_over(ParameterChange change, const NormBlocks& norm);
  /// Continues, in a new session, what hand_over() returned; deletes the checkpoint.
  void continue_from(const RefreshState& before);

 private:
  // What `work`, which communicates nothing, throws on one rank is an error on all.
  void prepare_change(const std::function<void()>& work);

  const StepContext& context_;
  const TrainingParts parts_;
  Checkpointer& checkpointer_;
};

}  // namespace zr::host
