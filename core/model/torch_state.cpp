#include "model/torch_state.hpp"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>

#include "base/log.hpp"
#include "base/text.hpp"

namespace zr::host::model {

void TorchModel::State::convert_buffers() {
  for (auto& [name, tensor] : buffers) {
    Placeholder::mark(tensor, false);
    if (is_cast(name, tensor) && tensor.scalar_type() != weight_type)
      storages->replace_buffer_data(name, tensor, tensor.to(weight_type));
    if (tensor.device() != device) storages->replace_buffer_data(name, tensor, tensor.detach().to(device));
    if (!tensor.is_contiguous()) storages->replace_buffer_data(name, tensor, tensor.contiguous());
    buffer_kinds[name] = kind_of(tensor);
  }
  mark_kept_buffers();
}

bool TorchModel::State::is_cast(const std::string& name, const torch::Tensor& buffer) const {
  return buffer.is_floating_point() && std::any_of(cast_buffers.begin(), cast_buffers.end(),
                                                   [&](const auto& pattern) { return matches_glob(name, pattern); });
}

void TorchModel::State::mark_kept_parameter(uint32_t param, at::ScalarType type) {
  if (type == weight_type) return;
  kept_parameters.add(parameters[param].name, entries[param].tensor, type_name(weight_type), true);
}

void TorchModel::State::mark_kept_buffers() {
  kept_buffers.clear();
  if (weight_type == at::kFloat) return;
  for (const auto& [name, tensor] : buffers)
    if (tensor.is_floating_point() && tensor.scalar_type() != weight_type)
      kept_buffers.add(name, tensor, type_name(weight_type));
}

void TorchModel::State::intercept(uint32_t param, at::ScalarType type, const std::string& reason) {
  auto& entry = entries[param];
  const torch::Tensor empty = Placeholder::make(entry.tensor.sizes(), options(type), this, param,
                                                host::worded("parameter '" + parameters[param].name + reason));
  Placeholder::mark(empty, false);  // set_data() requires the same dispatch keys
  storages->replace_data(parameters[param].name, entry.tensor, empty);
  Placeholder::mark(entry.tensor, true);
  entry.placeholder = Placeholder::find(entry.tensor);
  mark_kept_parameter(param, type);
}

void TorchModel::State::check_process() const {
  if (owner.is_parent())
    fail_user(
        "a process made by fork() uses a parameter that an engine of its parent trains, which would exchange data with "
        "the ranks of the job; use the model only in the process that created the engine, or copy its weights there "
        "before fork() (zr::gather, clone())");
}

void TorchModel::State::enter(const ParamUse* param_uses, std::size_t n) {
  check_process();
  c10::SmallVector<uint32_t, 8> params;
  bool is_written = false;  // the results are stored, so they must not be made of rounded weights
  for (std::size_t i = 0; i < n; ++i) {
    const uint32_t param = param_uses[i].placeholder->index();
    if (!entries[param].shared) {
      params.push_back(param);
      is_written |= param_uses[i].written;
      continue;
    }
    change_readers(param, 1);
    if (param_uses[i].written) begin_write_copy(param);
  }
  if (params.empty()) return;
  const uint32_t phase = is_written ? ZR_EXPORT_PHASE : at::GradMode::is_enabled() ? ZR_FORWARD : ZR_EVAL;
  uses.begin(params.data(), static_cast<uint32_t>(params.size()), phase);
}

void TorchModel::State::leave(const ParamUse* param_uses, std::size_t n, bool done) {
  c10::SmallVector<uint32_t, 8> params;
  c10::SmallVector<bool, 8> written;
  std::exception_ptr failure;
  for (std::size_t i = 0; i < n; ++i) {
    const uint32_t param = param_uses[i].placeholder->index();
    if (!entries[param].shared) {
      params.push_back(param);
      written.push_back(param_uses[i].written && done);
      if (written.back()) try {
          download_attached(param);
        } catch (...) {
          failure = std::current_exception();
          written.back() = false;
        }
      continue;
    }
    if (param_uses[i].written) try {
        end_write_copy(param, done);
      } catch (...) {
        failure = std::current_exception();
      }
    change_readers(param, -1);
  }
  if (!params.empty()) uses.end(params.data(), written.data(), static_cast<uint32_t>(params.size()));
  if (failure) std::rethrow_exception(failure);
}

bool TorchModel::State::in_scope(const Placeholder& placeholder) const {
  return entries[placeholder.index()].scopes > 0;
}

std::string TorchModel::State::remedy() const {
  return std::string("call torch::load(") + (is_on_cpu() ? "" : "module, file, engine.device()") +
         ") within a zr::gather(model->parameters()) scope, or engine.set() or engine.load(); call module->to() and " +
         "set_data() before the engine is made";
}

std::string TorchModel::State::rebind_replaced(uint32_t param, bool keeps_writes) {
  auto& entry = entries[param];
  if (!entry.binding.storage || entry.tensor.storage().is_alias_of(entry.binding.storage)) return "";
  const torch::NoGradGuard no_grad;
  const torch::Tensor values = entry.tensor.detach();
  torch::Tensor bound = torch::empty({0}, options(entry.binding.type));
  bound.set_(entry.binding.storage, 0, parameters[param].shape);
  Storages::set_data(entry.tensor, bound);
  // After set_() the tensor would get a new accumulator at its next use, without the hook.
  if (entry.accumulator) torch::autograd::impl::set_grad_accumulator(entry.tensor, entry.accumulator);
  if (!keeps_writes) return "";
  if (values.sizes() != bound.sizes()) return parameters[param].name;
  bound.copy_(values);
  return "";
}

void TorchModel::State::change_readers(uint32_t param, int change) {
  const MutexLock lock(sharing_mutex);
  ParamEntry& entry = entries[param];
  entry.readers += change;
  entry.placeholder->set_readable(entry.readers > 0);
}

void TorchModel::State::begin_write_copy(uint32_t param) {
  const MutexLock lock(sharing_mutex);
  ParamEntry& entry = entries[param];
  if (entry.writers++ > 0) return;
  const std::size_t bytes = entry.placeholder->storage().nbytes();
  entry.copy = c10::GetAllocator(c10::kCPU)->allocate(bytes);
  std::memcpy(entry.copy.mutable_get(), entry.shared, bytes);
  entry.placeholder->attach(entry.copy.mutable_get());
}

void TorchModel::State::end_write_copy(uint32_t param, bool keeps_writes) {
  const MutexLock lock(sharing_mutex);
  ParamEntry& entry = entries[param];
  if (--entry.writers > 0) return;
  const at::DataPtr copy = std::move(entry.copy);
  entry.placeholder->attach(const_cast<void*>(entry.shared));
  entry.placeholder->set_readable(entry.readers > 0);
  if (keeps_writes) uses.wrote(param, copy.get());
}

void TorchModel::State::return_shared(uint32_t param) {
  ParamEntry& entry = entries[param];
  const c10::Storage old = entry.tensor.storage();  // views may still use it
  if (!leaves_for_reload) {
    entry.placeholder->set_readable(true);
    Placeholder::mark(entry.tensor, false);
    if (!entry.returned.defined())
      entry.returned =
          entry.copy_buffer.defined() ? entry.copy_buffer.copy_(entry.tensor.detach()) : entry.tensor.detach().clone();
    entry.tensor.set_data(entry.returned);
  }
  entry.placeholder->orphan("the engine that shared parameter '" + parameters[param].name +
                            "' was released, and views of it created before have no memory; create them again");
  entry.shared = nullptr;
  entry.placeholder = nullptr;
}

torch::Tensor TorchModel::State::returned_tensor(uint32_t param) {
  ParamEntry& entry = entries[param];
  return is_on_cpu() ? entry.returned : entry.copy_buffer.copy_(entry.returned);
}

void TorchModel::State::return_sharded(uint32_t param) {
  ParamEntry& entry = entries[param];
  if (!entry.returned.defined())
    return entry.placeholder->orphan("the engine that sharded parameter '" + parameters[param].name +
                                     "' was destroyed, and the parameter's values are lost; call engine.release() on "
                                     "all ranks before the engine is destroyed, which gives the model its full "
                                     "weights");
  const c10::Storage old = entry.tensor.storage();  // views may still use it
  Placeholder::mark(entry.tensor, false);
  entry.tensor.set_data(returned_tensor(param));
  entry.placeholder->orphan("the engine that sharded parameter '" + parameters[param].name +
                            "' was released, and views of it created before have no memory; create them again");
  entry.placeholder = nullptr;
}

void TorchModel::State::return_bound(uint32_t param) {
  ParamEntry& entry = entries[param];
  c10::StorageImpl& storage = *entry.binding.storage.unsafeGetStorageImpl();
  if (entry.binding.host) {
    storage.set_resizable(true);
  } else if (storage.data() == entry.binding.memory) {  // tensors created from the parameter keep its values
    const c10::DeviceGuard guard(device);
    c10::Allocator* const allocator = c10::GetAllocator(device.type());
    const bool is_reserved = entry.copy_buffer.defined() && (is_on_cpu() || !entry.returned.defined());
    at::DataPtr own =
        is_reserved ? entry.copy_buffer.storage().set_data_ptr(at::DataPtr()) : allocator->allocate(storage.nbytes());
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    if (is_on_cpu())
      std::memcpy(own.mutable_get(), entry.binding.memory, storage.nbytes());
    else
      memory->copy({const_cast<void*>(entry.binding.memory), bytes, ZR_U8, 0, memory->device()},
                   {own.mutable_get(), bytes, ZR_U8, 0, memory->device()});
    storage.set_data_ptr_noswap(std::move(own));
    storage.set_allocator(allocator);
    storage.set_resizable(true);
  }
  if (entry.returned.defined()) entry.tensor.set_data(returned_tensor(param));  // of another type
}

void TorchModel::State::gradient_accumulated(uint32_t param) {
  const MutexLock lock(gradient_mutex);
  check_process();
  ParamEntry& entry = entries[param];
  torch::Tensor gradient = entry.tensor.grad();
  if (!gradient.defined()) return;  // a reentrant backward may call the hook without a gradient
  entry.tensor.mutable_grad() = torch::Tensor();
  if (gradient.is_sparse()) {
    if (!entry.densified)
      log(ZR_LOG_INFO, "the sparse gradient of '" + parameters[param].name + "' is converted to dense");
    entry.densified = true;
    gradient = gradient.to_dense();
  }
  gradient = gradient.detach();
  if (uses_engine_memory()) {
    if (keeps_on_device) memory->keep_for_engine(gradient);
    const auto scope = engine_stream();  // the gradient may be delivered on another thread
    return deliver(param, gradient);
  }
  if (computed) computed(param);
  if (downloads) downloads->add(param, gradient);
}

void TorchModel::State::deliver(uint32_t param, const torch::Tensor& gradient) {
  ParamEntry& entry = entries[param];
  // A second call within one backward adds in fp32; the copy rounds once, to the communication dtype.
  entry.gradient = entry.gradient.defined() ? entry.gradient.to(at::kFloat) + gradient.to(at::kFloat) : gradient;
  if (!arrived) return;
  try {
    arrived(param);
  } catch (...) {  // of a backward that the engine did not start: a later one must not add to it
    entry.gradient = torch::Tensor();
    throw;
  }
}

}  // namespace zr::host::model
