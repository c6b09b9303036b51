// Batches of kernels for the simulated device, as tasks on its streams.
#pragma once

#include "../sim_device/device_calls.hpp"

namespace sim {

/// Calls update(entry) in a task for each entry of a batch.
template <class Batch, class Update>
void enqueue_batch(void* native_stream, const char* name, const Batch& batch, Update update) {
  enqueue(native_stream, name, [batch, update] {
    for (uint32_t i = 0; i < batch.n; ++i) update(batch.entries[i]);
  });
}

}  // namespace sim
