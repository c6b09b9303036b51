#include "model/torch_state.hpp"

#include <cstring>

#include "base/log.hpp"

namespace zr::host {

void TorchModel::State::convert_buffers() {
  for (auto& [name, tensor] : buffers) {
    Placeholder::mark(tensor, false);
    if (tensor.is_floating_point() && tensor.scalar_type() != buffer_type && buffer_type != at::kFloat)
      storages->move_buffer(name, tensor, tensor.to(buffer_type));
    if (!tensor.is_contiguous()) storages->move_buffer(name, tensor, tensor.contiguous());
    buffer_kinds[name] = kind_of(tensor);
  }
}

void TorchModel::State::intercept(uint32_t param, at::ScalarType type, const std::string& reason) {
  auto& slot = slots[param];
  const torch::Tensor empty =
      Placeholder::make(slot.tensor.sizes(), type, this, param, "parameter '" + parameters[param].name + reason);
  Placeholder::mark(empty, false);  // set_data wants the same keys
  storages->move(parameters[param].name, slot.tensor, empty);
  Placeholder::mark(slot.tensor, true);
  slot.placeholder = Placeholder::behind(slot.tensor);
}

void TorchModel::State::enter(const Touch* touches, std::size_t n) {
  c10::SmallVector<uint32_t, 8> params;
  for (std::size_t i = 0; i < n; ++i) {
    const uint32_t param = touches[i].placeholder->index();
    if (!slots[param].shared) {
      params.push_back(param);
      continue;
    }
    expose(param, 1);
    if (touches[i].written) lend_copy(param);
  }
  if (params.empty()) return;
  uses.begin(params.data(), static_cast<uint32_t>(params.size()), at::GradMode::is_enabled() ? ZR_FORWARD : ZR_EVAL);
}

void TorchModel::State::leave(const Touch* touches, std::size_t n, bool done) {
  c10::SmallVector<uint32_t, 8> params;
  c10::SmallVector<bool, 8> written;
  for (std::size_t i = 0; i < n; ++i) {
    const uint32_t param = touches[i].placeholder->index();
    if (!slots[param].shared) {
      params.push_back(param);
      written.push_back(touches[i].written && done);
      continue;
    }
    if (touches[i].written) take_copy(param, done);
    expose(param, -1);
  }
  if (!params.empty()) uses.end(params.data(), written.data(), static_cast<uint32_t>(params.size()));
}

bool TorchModel::State::in_scope(const Placeholder& placeholder) const { return slots[placeholder.index()].scopes > 0; }

std::string TorchModel::State::instead() const {
  return "call torch::load() within a zr::gather(model->parameters()) scope, or engine.set() or engine.load(); call "
         "module->to() and set_data() before the engine is made";
}

std::string TorchModel::State::take_exchanged(uint32_t param, bool takes_over) {
  auto& slot = slots[param];
  if (!slot.binding.storage || slot.tensor.storage().is_alias_of(slot.binding.storage)) return "";
  const torch::NoGradGuard no_grad;
  const torch::Tensor values = slot.tensor.detach();
  torch::Tensor bound = torch::empty({0}, slot.binding.type);
  bound.set_(slot.binding.storage, 0, parameters[param].shape);
  slot.tensor.set_data(bound);
  // set_() gives the tensor another accumulator at its next use, which would not have the hook.
  if (slot.accumulator) torch::autograd::impl::set_grad_accumulator(slot.tensor, slot.accumulator);
  if (!takes_over) return "";
  if (values.sizes() != bound.sizes()) return parameters[param].name;
  bound.copy_(values);
  return "";
}

void TorchModel::State::expose(uint32_t param, int by) {
  const std::lock_guard lock(sharing);
  Slot& slot = slots[param];
  slot.readers += by;
  slot.placeholder->expose(slot.readers > 0);
}

void TorchModel::State::lend_copy(uint32_t param) {
  const std::lock_guard lock(sharing);
  Slot& slot = slots[param];
  if (slot.writers++ > 0) return;
  const std::size_t bytes = slot.placeholder->storage().nbytes();
  slot.copy = c10::GetAllocator(c10::kCPU)->allocate(bytes);
  std::memcpy(slot.copy.mutable_get(), slot.shared, bytes);
  slot.placeholder->attach(slot.copy.mutable_get());
}

void TorchModel::State::take_copy(uint32_t param, bool takes_over) {
  const std::lock_guard lock(sharing);
  Slot& slot = slots[param];
  if (--slot.writers > 0) return;
  if (takes_over) uses.wrote(param, slot.copy.get());
  slot.placeholder->attach(const_cast<void*>(slot.shared));
  slot.placeholder->expose(slot.readers > 0);
  slot.copy.clear();
}

void TorchModel::State::fired(uint32_t param) {
  const std::lock_guard lock(mutex);
  Slot& slot = slots[param];
  torch::Tensor gradient = slot.tensor.grad();
  if (!gradient.defined()) return;  // a reentrant backward may fire with nothing
  slot.tensor.mutable_grad() = torch::Tensor();
  if (gradient.is_sparse()) {
    if (!slot.densified) log(ZR_LOG_INFO, "the sparse gradient of '" + parameters[param].name + "' is made dense");
    slot.densified = true;
    gradient = gradient.to_dense();
  }
  gradient = gradient.detach();
  // A second firing within one backward adds in fp32; rounding to the wire's dtype happens once, at the copy.
  slot.gradient = slot.gradient.defined() ? slot.gradient.to(at::kFloat) + gradient.to(at::kFloat) : gradient;
  if (arrived) arrived(param);
}

}  // namespace zr::host
