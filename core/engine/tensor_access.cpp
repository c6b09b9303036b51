#include "engine/tensor_access.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "base/hex.hpp"
#include "base/text.hpp"
#include "checkpoint/manifest.hpp"

namespace zr::host::engine {

TensorAccess::TensorAccess(const job::StepContext& context, const TrainingParts& parts)
    : context_(context), parts_(parts) {
  const std::vector<plan::Parameter>& parameters = context.plan.input.parameters;
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    index_.emplace(parameters[i].name, i);
    for (const std::string& alias : parameters[i].aliases) index_.emplace(alias, i);
  }
}

uint32_t TensorAccess::find(const std::string& parameter) const {
  if (const auto found = index_.find(parameter); found != index_.end()) return found->second;
  std::vector<std::string> names;
  for (const plan::Parameter& p : context_.plan.input.parameters) names.push_back(p.name);
  const std::string near = nearest(parameter, names);
  fail_user(fmt::format("the model has no parameter '{}'{}", printable(parameter),
                        near.empty() ? "" : fmt::format("; did you mean '{}'?", near)));
}

std::size_t TensorAccess::find_buffer(const std::string& name) {
  const std::vector<model::ModelBuffer> buffers = context_.model.buffers();
  const auto found =
      std::find_if(buffers.begin(), buffers.end(), [&](const model::ModelBuffer& b) { return b.name == name; });
  if (found == buffers.end()) fail_internal(fmt::format("the model has no buffer '{}'", name));
  return static_cast<std::size_t>(found - buffers.begin());
}

std::string TensorAccess::buffer(const std::string& name) {
  const std::size_t index = find_buffer(name);
  std::string declared;
  parts_.step_timer.exclude(
      [&] { declared = parts_.buffers.declared(context_.comm, parts_.buffers.differing(context_.comm))[index]; });
  parts_.step_timer.restart_clock();
  if (!declared.empty()) return declared;
  const model::ModelBuffer buffer = parts_.buffers.own_buffers()[index];
  return {static_cast<const char*>(buffer.data), static_cast<std::size_t>(buffer.bytes)};
}

void TensorAccess::set_buffer(const std::string& name, const std::string& bytes) {
  const std::size_t index = find_buffer(name);
  if (parts_.buffers.in_evaluation())
    fail_user(
        fmt::format("engine.set_buffer('{}') was called during a zr::Engine::Evaluation, which restores the buffer's "
                    "earlier value when it ends; call it before or after the evaluation",
                    name));
  const uint64_t hash = checkpoint::hash_of(bytes.data(), static_cast<int64_t>(bytes.size()));
  std::vector<std::string> hashes;
  parts_.step_timer.exclude([&] {
    hashes = context_.comm.all_gather_bytes(std::string(reinterpret_cast<const char*>(&hash), sizeof hash),
                                            "engine.set_buffer()");
  });
  for (std::size_t r = 1; r < hashes.size(); ++r)
    if (hashes[r] != hashes[0])
      fail_user(fmt::format(
          "engine.set_buffer('{}'): rank {} passes different values than rank 0; pass the same tensor on all ranks",
          name, r));
  std::memcpy(parts_.buffers.own_buffers()[index].data, bytes.data(), bytes.size());
  context_.model.write_buffers();
  parts_.step_timer.restart_clock();
}

void TensorAccess::read(uint32_t param, state::LogicalTensor kind, const std::string& slot, float* out) {
  const plan::Parameter& parameter = context_.plan.input.parameters[param];
  const TrainingProgress& progress = parts_.progress;
  progress.check_complete();
  kind == state::LogicalTensor::gradient ? progress.check_gradients(parameter.name)
                                         : parts_.update.before_access(fmt::format("engine.get('{}')", parameter.name));
  if (kind == state::LogicalTensor::value) {
    // Until a zr::gather scope ends, only some strategies make writes inside it visible here.
    context_.model.check_scope(param, fmt::format("engine.get('{}')", parameter.name));
    parts_.weights.compare();
  }
  if (parameter.frozen && kind != state::LogicalTensor::value)
    fail_user(fmt::format("parameter '{}' is frozen: it has no gradient and no optimizer state", parameter.name));
  parts_.state.read(param, kind, slot, 0, parameter.count, out);
  if (kind == state::LogicalTensor::gradient)
    for (int64_t i = 0; i < parameter.count; ++i) out[i] *= progress.grad_mul();
}

void TensorAccess::check_same_values(const plan::Parameter& parameter, const float* values) {
  const uint64_t hash = checkpoint::hash_of(values, parameter.count * 4);
  const auto hashes =
      context_.comm.all_gather_bytes(std::string(reinterpret_cast<const char*>(&hash), sizeof hash), "engine.set");
  for (std::size_t r = 1; r < hashes.size(); ++r)
    if (hashes[r] != hashes[0])
      fail_user(fmt::format(
          "engine.set('{}'): rank {} passes different values than rank 0; pass the same tensor on all ranks",
          parameter.name, r));
}

void TensorAccess::write(uint32_t param, state::LogicalTensor kind, const std::string& slot, const float* values) {
  const plan::Parameter& parameter = context_.plan.input.parameters[param];
  if (kind == state::LogicalTensor::gradient)
    fail_user(
        fmt::format("engine.set('{}', zr::TensorKind::gradient): a gradient cannot be set, because engine.backward() "
                    "computes it; set the value or an optimizer state",
                    parameter.name));
  if (kind == state::LogicalTensor::state && parameter.frozen)
    fail_user(fmt::format("parameter '{}' is frozen: it has no optimizer state", parameter.name));
  parts_.update.before_access(fmt::format("engine.set('{}')", parameter.name));
  check_same_values(parameter, values);
  kind == state::LogicalTensor::state ? parts_.local.restart(param) : parts_.local.masters_changed();
  if (kind == state::LogicalTensor::state) return parts_.state.write_state(param, slot, values);
  context_.model.check_scopes(fmt::format("engine.set('{}')", parameter.name));
  parts_.weights.begin_replacement();
  parts_.state.store(param, values);
  parts_.weights.end_replacement(param);
}

std::string TensorAccess::weights_hash() {
  context_.model.check_scopes("engine.weights_hash()");
  parts_.progress.check_complete();
  parts_.update.before_access("engine.weights_hash()");
  parts_.weights.compare();
  parts_.weights.collect_writes();
  constexpr int64_t kPart = 64 * plan::kNormBlock;  // elements read at a time, for a model of any size
  const std::vector<plan::Parameter>& parameters = context_.plan.input.parameters;
  std::vector<uint32_t> order(parameters.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return parameters[a].name < parameters[b].name; });
  checkpoint::Hash hash;
  std::vector<float> values(kPart);
  for (const uint32_t param : order) {
    const plan::Parameter& parameter = parameters[param];
    hash.add(parameter.name.c_str(), std::ssize(parameter.name) + 1);
    for (int64_t first = 0; first < parameter.count; first += kPart) {
      const int64_t count = std::min(kPart, parameter.count - first);
      parts_.state.read(param, state::LogicalTensor::value, "", first, count, values.data());
      hash.add(values.data(), count * 4);
    }
  }
  return hex(hash.value());
}

}  // namespace zr::host::engine
