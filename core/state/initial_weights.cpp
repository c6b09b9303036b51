#include "state/initial_weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/dtype.hpp"
#include "base/error.hpp"

namespace zr::host::state {

namespace {
constexpr const char* kStartTag = "start of training";

// Replaces the bytes by those of rank 0.
void broadcast_memory(comm::CommRuntime& comm, void* data, int64_t bytes, const char* what) {
  const std::string sent =
      comm.broadcast_bytes(std::string(static_cast<const char*>(data), static_cast<std::size_t>(bytes)), 0, what);
  if (static_cast<int64_t>(sent.size()) != bytes)
    fail_user(fmt::format("{} differ from this rank's: {} bytes, not {}; build the same model on all ranks", what,
                          sent.size(), bytes));
  std::memcpy(data, sent.data(), sent.size());
}

void broadcast_parameters(const job::StepContext& context, ShardedState& state, float* values) {
  model::Model& model = context.model;
  const std::vector<plan::Parameter>& parameters = context.plan.input.parameters;
  // Broadcasts rank 0's values through `values`, which is memory of the communicator, and stores it on every rank.
  const auto broadcast_parameter = [&](uint32_t param, const float* rank_zero_values) {
    const int64_t count = parameters[param].count;
    if (context.rank() == 0 && rank_zero_values != values)
      std::memcpy(values, rank_zero_values, static_cast<std::size_t>(count) * 4);
    zr_coll broadcast{};
    broadcast.op = ZR_BROADCAST;
    broadcast.src = broadcast.dst = {values, count, ZR_F32, 0, {1, 0}};
    broadcast.label = "rank 0's parameters";
    context.comm.run_control(broadcast);
    state.store(param, values);
  };
  if (model.deferred() > 0) {
    const auto load = [&](uint32_t param, float* out) {
      model.check_scope(param, fmt::format("engine.get('{}')", parameters[param].name));
      state.read(param, LogicalTensor::value, "", 0, parameters[param].count, out);
    };
    const auto account = [&](int64_t bytes) { context.ledger.add(Tier::device, MemoryKind::other, kStartTag, bytes); };
    const auto broadcast = [&](void* data, int64_t bytes) {
      broadcast_memory(context.comm, data, bytes, "rank 0's tensors");
    };
    model.construct({values, broadcast_parameter, load, account, broadcast}, context.rank() == 0);
    return;
  }
  for (uint32_t param = 0; param < parameters.size(); ++param) {
    if (context.rank() == 0) model.read(param, values);
    broadcast_parameter(param, values);
  }
}

void bind(const job::StepContext& context, const StateBuffers& buffers) {
  for (const plan::Piece& piece : context.plan.rank_plan.weights) {
    if (piece.shard || piece.count != context.plan.input.parameters[piece.param].count) continue;
    const zr_dtype dtype = context.plan.input.dtype_of(piece.param);
    const int64_t offset = piece.offset * size_of(dtype);
    if (const void* reader = buffers.readers()[piece.buffer])
      context.model.bind_shared(piece.param, static_cast<const char*>(reader) + offset, dtype);
    else
      context.model.bind(piece.param, static_cast<char*>(buffers.memory()[piece.buffer]) + offset, dtype);
  }
}
}  // namespace

void broadcast_initial_weights(const job::StepContext& context, ShardedState& state) {
  comm::CommRuntime& comm = context.comm;
  int64_t largest = 0;
  for (const plan::Parameter& p : context.plan.input.parameters) largest = std::max(largest, p.count);
  auto* values = static_cast<float*>(comm.allocate(largest * 4, 64, Tier::device, MemoryKind::other, kStartTag));
  broadcast_parameters(context, state, values);
  comm.free(values);
  for (const model::ModelBuffer& buffer : context.model.buffers())
    broadcast_memory(comm, buffer.data, buffer.bytes, "rank 0's buffers");
  context.model.write_buffers();
  comm.barrier(kStartTag);  // until the owners have written the shared weights
  bind(context, state.buffers());
}

}  // namespace zr::host::state
