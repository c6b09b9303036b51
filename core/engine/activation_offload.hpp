// Saved-tensor offload: stores the tensors that forward saves for backward on a tier.
#pragma once

#include <cstdint>
#include <vector>

#include "job/step_context.hpp"
#include "offload/activation_store.hpp"
#include "offload/tier.hpp"

namespace zr::host::engine {

/// While the object exists, the model's saved tensors are stored on the tier. Constructed and destroyed on the training
/// thread.
class ActivationOffload {
 public:
  /// Keeps references to both arguments.
  ActivationOffload(const job::StepContext& context, offload::TierStore& tier)
      : library_(context.model), activations_(tier, context.ledger, context.plan.activation_staging_bytes()) {
    library_.offload_saved_tensors({context.config().offload().activation_bytes,
                                    [this](const void* data, int64_t bytes) { return activations_.put(data, bytes); },
                                    [this](uint64_t record, void* to) { activations_.get(record, to); },
                                    [this](const std::vector<uint64_t>& records) { activations_.prefetch(records); },
                                    [this](uint64_t record) { activations_.drop(record); }});
  }
  ~ActivationOffload() { library_.offload_saved_tensors({}); }
  ActivationOffload(const ActivationOffload&) = delete;

  const offload::ActivationStore& activations() const { return activations_; }

 private:
  model::LibraryMemory& library_;
  offload::ActivationStore activations_;
};

}  // namespace zr::host::engine
