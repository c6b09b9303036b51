// A rank's contribution to a checkpoint: its parts of every tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/save.hpp"
#include "engine/model_buffers.hpp"
#include "job/step_context.hpp"
#include "state/sharded_state.hpp"

namespace zr::host::engine {

/// A tensor of a checkpoint that belongs to a parameter.
struct ParameterTensor {
  uint32_t param;
  checkpoint::TensorInfo info;
  plan::StateShape shape;  // elements of the tensor per element of the parameter
};
/// Calls fn for every weight, master and optimizer state of every parameter, in the same order on all ranks.
void for_each_tensor(const plan::MemoryPlan& plan, const std::function<void(ParameterTensor tensor)>& fn);

/// Checkpoint values of the model's buffers; both vectors are indexed by buffer.
struct BufferValues {
  std::vector<char> differing;        // not 0: differs between ranks, so each rank's own value is saved too
  std::vector<std::string> declared;  // bytes selected by train.buffers; empty: this rank's own
};
/// Tensors and this rank's slabs. Slabs refer to the memory of `state`, `buffers` and `values`, which must outlive the
/// save; slabs on a disk tier or on the device are read during the save, a chunk at a time. Throws UserError for a
/// buffer whose dtype safetensors does not support.
checkpoint::CheckpointContents contents_of(const job::StepContext& context, state::ShardedState& state,
                                           ModelBuffers& buffers, const BufferValues& values);

}  // namespace zr::host::engine
