// TorchModel on a device: copies of weights, buffers and gradients between host memory and the device.
#include <c10/core/DeviceGuard.h>

#include "model/allocator.hpp"
#include "model/torch_dtype.hpp"
#include "model/torch_state.hpp"

namespace zr::host::model {

namespace {
int64_t byte_offset(const torch::Tensor& tensor) {
  return tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}
}  // namespace

std::vector<ModelBuffer> TorchModel::buffers() {
  std::vector<ModelBuffer> list;
  state_->host_buffers.resize(state_->is_on_cpu() ? 0 : state_->buffers.size());
  for (std::size_t i = 0; i < state_->buffers.size(); ++i) {
    const auto& [name, tensor] = state_->buffers[i];
    void* memory = nullptr;
    if (!state_->construction && state_->is_on_cpu()) {
      memory = tensor.data_ptr();
    } else if (!state_->construction) {
      torch::Tensor& on_host = state_->host_buffers[i];
      if (!on_host.defined() || on_host.nbytes() != tensor.nbytes())
        on_host = at::empty({static_cast<int64_t>(tensor.nbytes())}, at::kByte);
      memory = on_host.mutable_data_ptr();
      download(tensor.storage(), memory, static_cast<int64_t>(tensor.nbytes()), byte_offset(tensor));
    }
    list.push_back({name, memory, static_cast<int64_t>(tensor.nbytes()), safetensors_name(tensor.scalar_type()),
                    tensor.sizes().vec()});
  }
  return list;
}

void TorchModel::write_buffers() {
  std::vector<Upload> uploads;
  for (std::size_t i = 0; i < state_->host_buffers.size(); ++i) {
    const torch::Tensor& buffer = state_->buffers[i].second;
    uploads.push_back({state_->host_buffers[i].data_ptr(), buffer.storage(),
                       static_cast<int64_t>(state_->host_buffers[i].nbytes()), byte_offset(buffer)});
  }
  upload(uploads, {});
}

void TorchModel::weights_changed(bool frozen_too) {
  std::vector<Upload> uploads;
  for (std::size_t i = 0; i < state_->entries.size(); ++i)
    if (const Binding& binding = state_->entries[i].binding;
        binding.host && (frozen_too || !state_->parameters[i].frozen))
      uploads.push_back({binding.host, binding.storage, static_cast<int64_t>(binding.storage.nbytes())});
  upload(uploads, state_->parallel_for);
}

DeviceMemory* TorchModel::memory() { return state_->memory ? &*state_->memory : nullptr; }

void TorchModel::keep_on_device() { state_->keeps_on_device = state_->memory.has_value(); }

void TorchModel::use_threads(ParallelFor parallel_for) { state_->parallel_for = std::move(parallel_for); }

void TorchModel::attach(uint32_t param, void* memory) {
  auto& entry = state_->entries[param];
  Placeholder* placeholder = entry.placeholder;
  if (state_->uses_engine_memory()) return memory ? placeholder->attach(memory) : placeholder->detach();
  entry.attached = memory;
  if (!memory) {
    placeholder->detach();
    entry.on_device.clear();
    return;
  }
  const std::size_t bytes = placeholder->storage().nbytes();
  const c10::DeviceGuard guard(state_->device);
  entry.on_device = c10::GetAllocator(state_->device.type())->allocate(bytes);
  placeholder->attach(entry.on_device.mutable_get());
  upload(memory, entry.tensor.storage(), static_cast<int64_t>(bytes), state_->parallel_for);
}

void TorchModel::State::download_bound(uint32_t param) {
  if (const Binding& binding = entries[param].binding; binding.host)
    download(binding.storage, binding.host, static_cast<int64_t>(binding.storage.nbytes()));
}

void TorchModel::State::download_attached(uint32_t param) {
  const ParamEntry& entry = entries[param];
  if (!entry.attached) return;
  const c10::Storage& storage = entry.tensor.storage();
  download(storage, entry.attached, static_cast<int64_t>(storage.nbytes()));
}

void TorchModel::on_gradient_computed(std::function<void(uint32_t param)> computed) {
  state_->computed = std::move(computed);
}

void TorchModel::deliver_on_thread(bool on) {
  if (state_->downloads) state_->downloads->deliver_on_thread(on);
}

void TorchModel::finish_gradients() {
  if (state_->downloads) state_->downloads->finish();
}

void TorchModel::drop_computed_gradients() {
  if (state_->downloads) state_->downloads->drop();
}

DeviceBytes TorchModel::device_memory() const { return device_bytes(state_->device); }

void TorchModel::forget_peak() {
  TorchMemory::forget_peak();
  reset_peak(state_->device);
}

}  // namespace zr::host::model
