#include "engine/activation_offload.hpp"

namespace zr::host::engine {

ActivationOffload::ActivationOffload(const job::StepContext& context, offload::TierStore& tier)
    : library_(context.model), activations_(tier, context.ledger, context.plan.activation_staging_bytes()) {
  library_.offload_saved_tensors({context.config().offload().activation_bytes,
                                  [this](const void* data, int64_t bytes) { return activations_.put(data, bytes); },
                                  [this](uint64_t record, void* to) { activations_.get(record, to); },
                                  [this](const std::vector<uint64_t>& records) { activations_.prefetch(records); },
                                  [this](uint64_t record) { activations_.drop(record); }});
}

ActivationOffload::~ActivationOffload() { library_.offload_saved_tensors({}); }

}  // namespace zr::host::engine
