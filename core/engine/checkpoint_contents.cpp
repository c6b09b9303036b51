#include "engine/checkpoint_contents.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/round_up.hpp"
#include "checkpoint/safetensors.hpp"

namespace zr::host::engine {

void for_each_tensor(const plan::MemoryPlan& plan, const std::function<void(ParameterTensor tensor)>& fn) {
  const auto& parameters = plan.input.parameters;
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    const plan::Parameter& p = parameters[i];
    const auto add = [&](const std::string& kind, zr_dtype dtype, const plan::StateShape& shape) {
      fn({i,
          {kind, p.name, checkpoint::safetensors_name(dtype), shape.full(p),
           kind == "weight" ? p.aliases : std::vector<std::string>{}},
          shape});
    };
    add("weight", plan.input.dtype_of(i), {});
    if (p.frozen) continue;
    if (plan.has_master_of(i)) add("master", ZR_F32, {});
    for (const zr_slot& slot : plan.input.description(i).slots)
      add(std::string("state.") + slot.name, slot.dtype, plan::state_shape(p, slot));
  }
}

namespace {
// Copies bytes [from, from + bytes) of a slab, which begins at element `start` of the parameter.
void read_slab(state::ShardedState& state, const ParameterTensor& tensor, int64_t start, int64_t count, int64_t from,
               int64_t bytes, char* to) {
  const plan::StateShape& shape = tensor.shape;
  const int64_t size = checkpoint::stored_size(tensor.info.dtype), begin = shape.of(start) + from / size,
                end = begin + bytes / size;
  const int64_t first = begin / shape.width * shape.block,
                last = std::min((end + shape.width - 1) / shape.width * shape.block, start + count);
  state.visit_tensor(tensor.param, tensor.info.kind, first, last - first, offload::OptimizerStates::Access::read,
                     [&](const void* memory, int64_t at, int64_t n) {
                       const int64_t has = shape.of(at), a = std::max(begin, has), b = std::min(end, shape.of(at + n));
                       if (a < b)
                         std::memcpy(to + (a - begin) * size, static_cast<const char*>(memory) + (a - has) * size,
                                     static_cast<std::size_t>((b - a) * size));
                     });
}

checkpoint::Slab slab_of(state::ShardedState& state, DeviceMemory* device, const ParameterTensor& tensor,
                         uint32_t index, int64_t first, int64_t count) {
  const plan::StateShape& shape = tensor.shape;
  const int64_t size = checkpoint::stored_size(tensor.info.dtype), begin = shape.of(first),
                end = shape.of(first + count);
  checkpoint::Slab slab{index,
                        begin * size,
                        (end - begin) * size,
                        state.contiguous_address(tensor.param, tensor.info.kind, first, count),
                        {}};
  if (const char* const memory = state.contiguous_on_device(tensor.param, tensor.info.kind, first, count))
    slab.read = [device, memory](int64_t from, int64_t bytes, void* to) { device->download(memory + from, to, bytes); };
  else if (!slab.data)
    slab.read = [&state, tensor, first, count](int64_t from, int64_t bytes, void* to) {
      read_slab(state, tensor, first, count, from, bytes, static_cast<char*>(to));
    };
  return slab;
}

// Adds each buffer once, with the values selected by train.buffers; if ranks differ, also each rank's own values.
void add_buffers(const job::StepContext& context, checkpoint::CheckpointContents& contents, ModelBuffers& buffers,
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

checkpoint::CheckpointContents contents_of(const job::StepContext& context, state::ShardedState& state,
                                           ModelBuffers& buffers, const BufferValues& values) {
  checkpoint::CheckpointContents contents;
  for_each_tensor(context.plan, [&](ParameterTensor tensor) {
    const auto index = static_cast<uint32_t>(contents.tensors.size());
    for (const auto& [first, count] : context.plan.saved_ranges(tensor.param))
      contents.slabs.push_back(slab_of(state, context.device, tensor, index, first, count));
    const plan::Parameter& parameter = context.plan.input.parameters[tensor.param];
    if (tensor.info.kind == "weight")
      tensor.info.optimizer = parameter.frozen ? "" : context.optimizers.id(parameter.optimizer);
    contents.tensors.push_back(std::move(tensor.info));
  });
  add_buffers(context, contents, buffers, values);
  return contents;
}

}  // namespace zr::host::engine
