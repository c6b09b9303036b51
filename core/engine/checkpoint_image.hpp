// What a rank contributes to a checkpoint: its parts of every tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/save.hpp"
#include "engine/model_buffers.hpp"
#include "engine/sharded_state.hpp"
#include "engine/step_context.hpp"

namespace zr::host {

/// Calls fn for every tensor that belongs to a parameter, in an order that is the same on all ranks.
void each_tensor(const MemoryPlan& plan, const std::function<void(uint32_t param, TensorInfo tensor)>& fn);

/// By buffer of the model.
struct BufferValues {
  std::vector<char> differing;        // stored for each rank (ModelBuffers::differing())
  std::vector<std::string> declared;  // bytes that train.buffers declares, where they differ from this rank's own
};
/// Tensors and slabs, which refer to the memory of all that is given, and read what is on disk when they are saved.
/// Throws Failure(user) for a buffer of a type that files do not have.
CheckpointContents image_of(const StepContext& context, ShardedState& state, ModelBuffers& buffers,
                            const BufferValues& values);

}  // namespace zr::host
