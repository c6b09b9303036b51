// Saved tensors of forward on a tier: connects the model to it.
#pragma once

#include "engine/step_context.hpp"
#include "offload/activation_store.hpp"
#include "offload/tier.hpp"

namespace zr::host {

/// While it lives, what forward keeps for backward goes to the tier. Made and destroyed on the training thread.
class ActivationOffload {
 public:
  /// Refers to both.
  ActivationOffload(const StepContext& context, TierStore& tier);
  ~ActivationOffload();
  ActivationOffload(const ActivationOffload&) = delete;

  const ActivationStore& activations() const { return activations_; }

 private:
  Model& model_;
  ActivationStore activations_;
};

}  // namespace zr::host
