#include "engine/checkpoint_contents.hpp"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/round_up.hpp"
#include "checkpoint/safetensors.hpp"

namespace zr::host::engine {

void for_each_tensor(const plan::MemoryPlan& plan,
                     const std::function<void(uint32_t param, checkpoint::TensorInfo tensor)>& fn) {
  const auto of = [&](const plan::Parameter& p, const std::string& kind, zr_dtype dtype) {
    return checkpoint::TensorInfo{kind, p.name, checkpoint::safetensors_name(dtype), p.shape,
                                  kind == "weight" ? p.aliases : std::vector<std::string>{}};
  };
  const auto& parameters = plan.input.parameters;
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    fn(i, of(parameters[i], "weight", plan.input.weight_dtype));
    if (parameters[i].frozen) continue;
    if (plan.has_master) fn(i, of(parameters[i], "master", ZR_F32));
    for (const zr_slot& slot : plan.input.slots)
      fn(i, of(parameters[i], std::string("state.") + slot.name, slot.dtype));
  }
}

namespace {
checkpoint::Slab slab_of(ShardedState& state, uint32_t param, const checkpoint::TensorInfo& tensor, uint32_t index,
                         int64_t first, int64_t count) {
  const int64_t size = checkpoint::stored_size(tensor.dtype);
  checkpoint::Slab slab{
      index, first * size, count * size, state.contiguous_address(param, tensor.kind, first, count), {}};
  if (!slab.data)
    slab.read = [&state, param, kind = tensor.kind, size, start = first](int64_t from, int64_t bytes, void* to) {
      state.visit_tensor(param, kind, start + from / size, bytes / size, offload::OptimizerStates::Access::read,
                         [&](const void* memory, int64_t at, int64_t n) {
                           std::memcpy(static_cast<char*>(to) + (at - start) * size - from, memory,
                                       static_cast<std::size_t>(n * size));
                         });
    };
  return slab;
}

// Adds each buffer once, with the values selected by train.buffers; if ranks differ, also each rank's own values.
void add_buffers(const StepContext& context, checkpoint::CheckpointContents& contents, ModelBuffers& buffers,
                 const BufferValues& values) {
  const auto aligned = [](int64_t bytes) { return round_up(bytes, checkpoint::CheckpointContents::kAlignment); };
  const int rank = context.rank(), world = context.world();
  const std::vector<model::ModelBuffer> own_buffers = buffers.own_buffers();
  for (std::size_t i = 0; i < own_buffers.size(); ++i) {
    const model::ModelBuffer& buffer = own_buffers[i];
    if (checkpoint::stored_size(buffer.dtype) == 0)
      fail_user(
          fmt::format("cannot save buffer '{}': safetensors does not support its dtype {}; convert it to another "
                      "dtype, or do not register it as a buffer",
                      buffer.name, buffer.dtype));
    const bool declared = i < values.declared.size() && !values.declared[i].empty();
    if (rank == 0 && buffer.bytes > 0)
      contents.slabs.push_back({static_cast<uint32_t>(contents.tensors.size()),
                                0,
                                buffer.bytes,
                                declared ? values.declared[i].data() : buffer.data,
                                {}});
    contents.tensors.push_back({"buffer", buffer.name, buffer.dtype, buffer.shape, {}});
    if (!values.differing[i]) {
      contents.later_bytes += world > 1 ? aligned(buffer.bytes) : 0;
      continue;
    }
    std::vector<int64_t> shape{world};
    shape.insert(shape.end(), buffer.shape.begin(), buffer.shape.end());
    contents.slabs.push_back(
        {static_cast<uint32_t>(contents.tensors.size()), rank * buffer.bytes, buffer.bytes, buffer.data, {}});
    contents.tensors.push_back({checkpoint::kRankBuffer, buffer.name, buffer.dtype, std::move(shape), {}});
  }
}
}  // namespace

checkpoint::CheckpointContents contents_of(const StepContext& context, ShardedState& state, ModelBuffers& buffers,
                                           const BufferValues& values) {
  checkpoint::CheckpointContents contents;
  for_each_tensor(context.plan, [&](uint32_t param, checkpoint::TensorInfo tensor) {
    const auto index = static_cast<uint32_t>(contents.tensors.size());
    for (const auto& [first, count] : context.plan.saved_ranges(param))
      contents.slabs.push_back(slab_of(state, param, tensor, index, first, count));
    contents.tensors.push_back(std::move(tensor));
  });
  add_buffers(context, contents, buffers, values);
  return contents;
}

}  // namespace zr::host::engine
