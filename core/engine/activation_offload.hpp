// Saved-tensor offload: stores the tensors that forward saves for backward on a tier.
#pragma once

#include "job/step_context.hpp"
#include "offload/activation_store.hpp"
#include "offload/tier.hpp"

namespace zr::host::engine {

/// While the object exists, the model's saved tensors are stored on the tier. Constructed and destroyed on the training
/// thread.
class ActivationOffload {
 public:
  /// Keeps references to both arguments.
  ActivationOffload(const job::StepContext& context, offload::TierStore& tier);
  ~ActivationOffload();
  ActivationOffload(const ActivationOffload&) = delete;

  const offload::ActivationStore& activations() const { return activations_; }

 private:
  model::LibraryMemory& library_;
  offload::ActivationStore activations_;
};

}  // namespace zr::host::engine
