#include "model/torch_model.hpp"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <exception>

#include "base/error.hpp"
#include "model/allocator.hpp"
#include "model/torch_dtype.hpp"
#include "model/torch_state.hpp"

namespace zr::host::model {

namespace {

// Called when autograd has accumulated into one parameter's .grad.
class Hook final : public torch::autograd::FunctionPostHook {
 public:
  explicit Hook(std::function<void()> callback) : callback_(std::move(callback)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    callback_();
    return outputs;
  }

 private:
  std::function<void()> callback_;
};

// Elements [first, first + count) of the flattened gradient.
torch::Tensor part_of(const torch::Tensor& gradient, int64_t first, int64_t count) {
  const torch::Tensor flat = gradient.dim() == 1 ? gradient : gradient.reshape({-1});
  return first == 0 && count == flat.numel() ? flat : flat.narrow(0, first, count);
}

}  // namespace

bool TorchModel::has_buffer(const torch::Tensor& tensor) const {
  return std::any_of(state_->buffers.begin(), state_->buffers.end(),
                     [&](const auto& item) { return item.second.is_same(tensor); });
}

void TorchModel::leave_for_reload() { state_->leaves_for_reload = true; }

TorchModel::~TorchModel() {
  for (auto& entry : state_->entries)
    if (entry.accumulator && entry.hook) entry.accumulator->del_post_hook(entry.hook);
}

const std::vector<plan::Parameter>& TorchModel::parameters() const { return state_->parameters; }

std::vector<ModelBuffer> TorchModel::empty_buffers() const { return state_->empty_buffers; }

void TorchModel::read(uint32_t param, float* out) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& tensor = state_->entries[param].tensor;
  if (state_->entries[param].left_without_memory) return void(std::fill_n(out, tensor.numel(), 0.0f));
  torch::from_blob(out, tensor.sizes(), at::kFloat).copy_(tensor.detach());
}

// All deferred tensors must be of one construction; ordinary ones may be among them.
void TorchModel::check_deferred(const std::string& what, const torch::Tensor& tensor) {
  const auto construction = Construction::of(tensor);
  if (!construction) return;
  if (!state_->construction) state_->construction = construction;
  if (construction != state_->construction)
    fail_user(what +
              " was not built in the same zr::deferred call as other parameters or buffers; build the whole "
              "model in one call");
}

std::size_t TorchModel::deferred() const { return state_->construction ? state_->construction->size() : 0; }

void TorchModel::construct(const ConstructMemory& memory, bool runs_operators) {
  Replay::Tensors parameters;
  std::vector<bool> built;
  for (uint32_t i = 0; i < state_->entries.size(); ++i) {
    const torch::Tensor& tensor = state_->entries[i].tensor;
    parameters.emplace_back(state_->parameters[i].name, tensor);
    built.push_back(Construction::of(tensor) != nullptr);
  }
  state_->construction->replay({parameters, state_->buffers}, memory, runs_operators);
  for (uint32_t i = 0; i < state_->entries.size(); ++i) {
    const torch::Tensor& tensor = state_->entries[i].tensor;
    Placeholder* placeholder = built[i] ? placeholder_of(tensor) : nullptr;
    // Views that the constructor created stay on the placeholder.
    if (placeholder)
      placeholder->orphan("parameter '" + state_->parameters[i].name +
                          "' was built by zr::deferred: a view created in a constructor cannot be used; create it in "
                          "forward()");
    if (built[i]) Placeholder::mark(tensor, false);
    if (built[i] && tensor.numel() == 0)
      Storages::set_data(tensor, at::empty(tensor.sizes(), state_->options(tensor.scalar_type())));
    if (placeholder || tensor.numel() == 0) continue;
    if (runs_operators) read(i, memory.staging);
    memory.store(i, memory.staging);
  }
  state_->construction.reset();
  state_->convert_buffers();
}

void TorchModel::bind(uint32_t param, void* memory, zr_dtype dtype) {
  auto& entry = state_->entries[param];
  const at::ScalarType type = torch_type(dtype);
  const bool is_direct = state_->uses_engine_memory();
  if (!state_->storages->replaceable(entry.tensor, type) || entry.tensor.device() != state_->device)
    state_->storages->replace_data(state_->parameters[param].name, entry.tensor,
                                   is_direct ? tensor_over(memory, entry.tensor.sizes(), type, state_->device)
                                             : at::empty(entry.tensor.sizes(), state_->options(type)));
  const c10::Storage storage = entry.tensor.storage();
  if (is_direct)
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(Storages::engine_memory(memory, state_->device));
  else
    upload(memory, storage, static_cast<int64_t>(storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_resizable(false);
  constexpr std::size_t kEngineReferences = 2;  // the parameter and `storage`
  const bool has_older_tensors = storage.use_count() > kEngineReferences;
  entry.binding = {storage,
                   storage.data(),
                   is_direct ? nullptr : memory,
                   type,
                   version_of(entry.tensor),
                   has_older_tensors,
                   std::make_unique<DataViews>(storage),
                   is_direct ? nullptr : std::make_unique<Storages::DeviceBinding>(storage)};
  state_->mark_kept_parameter(param, type);
}

void TorchModel::on_use(Uses uses) { state_->uses = std::move(uses); }

void TorchModel::unbind(uint32_t param, zr_dtype dtype) {
  state_->intercept(
      param, torch_type(dtype),
      "' is sharded: it has memory only inside operators; read or write it within a zr::gather(parameter) scope");
}

void TorchModel::bind_shared(uint32_t param, const void* memory, zr_dtype dtype) {
  state_->intercept(param, torch_type(dtype),
                    "' is shared by the ranks of this node (communicator.share_weights): it has memory only inside "
                    "operators; read or write it within a zr::gather(parameter) scope");
  state_->entries[param].shared = memory;
  state_->entries[param].placeholder->attach(const_cast<void*>(memory));
  state_->entries[param].placeholder->set_readable(false);
}

void TorchModel::begin_gather(const std::vector<uint32_t>& params) {
  state_->check_process();
  if (state_->uses.scope) state_->uses.scope(params.data(), static_cast<uint32_t>(params.size()), true);
  std::vector<uint32_t> sharded;
  for (const uint32_t param : params) {
    ++state_->entries[param].scopes;
    if (state_->entries[param].shared) {
      state_->change_readers(param, 1);
      state_->begin_write_copy(param);
    } else if (state_->entries[param].placeholder)
      sharded.push_back(param);
  }
  if (!sharded.empty()) state_->uses.begin(sharded.data(), static_cast<uint32_t>(sharded.size()), ZR_EXPORT_PHASE);
}

void TorchModel::end_gather(const std::vector<uint32_t>& params, bool keeps_writes) {
  if (keeps_writes && state_->uses.scope)
    state_->uses.scope(params.data(), static_cast<uint32_t>(params.size()), false);
  std::vector<uint32_t> sharded;
  std::string wrong_shape;
  std::exception_ptr failure;
  for (const uint32_t param : params) {
    auto& entry = state_->entries[param];
    --entry.scopes;
    wrong_shape = wrong_shape.empty() ? state_->rebind_replaced(param, keeps_writes) : wrong_shape;
    entry.binding.version = -1;  // reports the parameter as written: writes through pointers change no counter
    if (entry.shared) {
      const std::exception_ptr failed = exception_of([&] { state_->end_write_copy(param, keeps_writes); });
      if (!failure) failure = failed;  // on all ranks: the other parameters' writes are stored
      state_->change_readers(param, -1);
    } else if (entry.placeholder) {
      sharded.push_back(param);
      if (keeps_writes) state_->download_attached(param);
    }
  }
  const std::unique_ptr<bool[]> written(new bool[sharded.size()]);
  std::fill_n(written.get(), sharded.size(), keeps_writes);
  if (!sharded.empty()) state_->uses.end(sharded.data(), written.get(), static_cast<uint32_t>(sharded.size()));
  if (failure) std::rethrow_exception(failure);
  if (!wrong_shape.empty())
    fail_user("the data of parameter '" + wrong_shape +
              "' was replaced by a tensor of another shape within a zr::gather scope; load a file whose shapes match "
              "the model");
}

void TorchModel::values_replaced(const std::vector<uint32_t>& params) {
  for (const uint32_t param : params) {
    auto& entry = state_->entries[param];
    if (entry.tensor.is_inference()) continue;
    const bool is_reported = entry.binding.version == version_of(entry.tensor);  // written() has reported all writes
    torch::autograd::impl::bump_version(entry.tensor);
    if (is_reported) entry.binding.version = version_of(entry.tensor);
  }
}

std::vector<uint32_t> TorchModel::written() {
  std::vector<uint32_t> params;
  for (uint32_t i = 0; i < state_->entries.size(); ++i) {
    auto& entry = state_->entries[i];
    if (!entry.binding.storage) continue;
    const int64_t version = version_of(entry.tensor);
    if (entry.binding.views->written() || version != entry.binding.version) params.push_back(i);
    entry.binding.version = version;
  }
  for (const uint32_t param : params) state_->download_bound(param);
  return params;
}

std::vector<uint32_t> TorchModel::may_be_written_untracked() {
  constexpr std::size_t kEngineReferences = 2;  // the parameter and the binding
  std::vector<uint32_t> params;
  for (uint32_t i = 0; i < state_->entries.size(); ++i) {
    Binding& binding = state_->entries[i].binding;
    binding.has_older_tensors &= binding.storage && binding.storage.use_count() > kEngineReferences;
    if (binding.has_older_tensors) params.push_back(i);
    if (binding.has_older_tensors) state_->download_bound(i);
  }
  return params;
}

std::vector<std::string> TorchModel::reshaped_parameters() const {
  std::vector<std::string> reshaped;
  for (uint32_t i = 0; i < state_->entries.size(); ++i) {
    const auto& [now, before] = std::pair(state_->entries[i].tensor.sizes(), state_->parameters[i].shape);
    if (now != at::IntArrayRef(before))
      reshaped.push_back("'" + state_->parameters[i].name + "' is " + c10::str(now) + " and was " +
                         c10::str(at::IntArrayRef(before)));
  }
  return reshaped;
}

void TorchModel::check_bindings() {
  for (uint32_t i = 0; i < state_->entries.size(); ++i) {
    const auto& entry = state_->entries[i];
    if (entry.tensor.sizes() != state_->parameters[i].shape || !entry.tensor.is_contiguous())
      fail_user("the shape or memory layout of parameter '" + state_->parameters[i].name +
                "' was changed after the engine was made (set_data(), t_(), transpose_(), resize_()); make a view in "
                "forward() instead (t(), transpose())");
    if (entry.binding.storage &&
        (!entry.tensor.storage().is_alias_of(entry.binding.storage) ||
         entry.binding.storage.data() != entry.binding.memory || entry.tensor.scalar_type() != entry.binding.type))
      fail_user("the data of parameter '" + state_->parameters[i].name +
                "' was replaced after the engine was made (torch::load(), module->to(), set_data()); " +
                state_->remedy());
  }
}

void TorchModel::check_scopes(const std::string& call) {
  for (uint32_t param = 0; param < state_->entries.size(); ++param) check_scope(param, call);
}

void TorchModel::check_scope(uint32_t param, const std::string& call) {
  const State::ParamEntry& entry = state_->entries[param];
  if (entry.scopes > 0 || entry.writers > 0)
    fail_user(call + " was called inside a zr::gather scope of '" + state_->parameters[param].name +
              "'; nothing was changed; end the scope before the call");
}

std::weak_ptr<const void> TorchModel::life() const { return state_->life; }
uint64_t TorchModel::number() const { return state_->number; }

void* TorchModel::reserve_parameter(uint32_t param, zr_dtype dtype, bool other) {
  auto& entry = state_->entries[param];
  if (!state_->is_on_cpu() && other)
    entry.copy_buffer = at::empty(entry.tensor.sizes(), state_->options(torch_type(dtype)));
  else if (entry.binding.storage && state_->uses_engine_memory())
    entry.copy_buffer = at::empty({static_cast<int64_t>(entry.binding.storage.nbytes())}, state_->options(at::kByte));
  else if (entry.shared && !other)
    entry.copy_buffer = at::empty(entry.tensor.sizes(), entry.tensor.options().requires_grad(false));
  if (!other) return nullptr;
  entry.returned = at::empty(entry.tensor.sizes(), torch_type(dtype));
  return entry.returned.mutable_data_ptr();
}

void TorchModel::cancel_reserved_parameters() {
  for (auto& entry : state_->entries) entry.returned = entry.copy_buffer = torch::Tensor();
}

void TorchModel::convert_buffers(zr_dtype dtype) {
  for (auto& [name, tensor] : state_->buffers)
    if (state_->is_cast(name, tensor)) tensor.set_data(tensor.to(torch_type(dtype)));
}

void TorchModel::return_parameters() {
  state_->kept_parameters.clear();
  hide_gradients(false);
  for (uint32_t i = 0; i < state_->entries.size(); ++i) {
    auto& entry = state_->entries[i];
    if (entry.shared)
      state_->return_shared(i);
    else if (entry.placeholder)
      state_->return_sharded(i);
    else if (entry.binding.storage)
      state_->return_bound(i);
    entry.returned = entry.copy_buffer = torch::Tensor();
    entry.binding = {};
  }
}

void TorchModel::hide_gradients(bool hidden) {
  for (std::size_t i = 0; i < state_->entries.size(); ++i) {
    auto& entry = state_->entries[i];
    if (state_->parameters[i].frozen) continue;
    if (hidden && !entry.hidden.defined())
      entry.hidden = Placeholder::make(
          entry.tensor.sizes(), at::TensorOptions().dtype(entry.tensor.scalar_type()).device(entry.tensor.device()),
          nullptr, 0,
          "the gradient of '" + state_->parameters[i].name + "' belongs to the engine: read it with engine.get(\"" +
              state_->parameters[i].name +
              "\", zr::TensorKind::gradient), clip with train.gradient_clipping, update with engine.step(), leave "
              "zero_grad() out, and call engine.backward(loss) instead of loss.backward(); if the loss belongs to "
              "another engine (as in a GAN), call requires_grad_(false) on these parameters around its backward");
    entry.tensor.mutable_grad() = hidden ? entry.hidden : torch::Tensor();
  }
}

void TorchModel::on_gradient(Arrived arrived) {
  state_->arrived = std::move(arrived);
  state_->downloads.reset();
  if (!state_->uses_engine_memory() && state_->arrived) {
    int64_t bytes = 0;
    for (uint32_t i = 0; i < state_->entries.size(); ++i)
      if (!state_->parameters[i].frozen) bytes += static_cast<int64_t>(state_->entries[i].tensor.nbytes());
    state_->downloads.emplace(state_->device, bytes, [state = state_.get()](uint32_t param, const at::Tensor& on_host) {
      state->deliver(param, on_host);
    });
  }
  for (uint32_t i = 0; i < state_->entries.size(); ++i) {
    auto& entry = state_->entries[i];
    if (state_->parameters[i].frozen || entry.accumulator) continue;
    entry.accumulator = torch::autograd::impl::grad_accumulator(entry.tensor);
    entry.hook = entry.accumulator->add_post_hook(
        std::make_unique<Hook>([state = state_.get(), i] { state->gradient_accumulated(i); }));
  }
}

zr_view TorchModel::gradient(uint32_t param) {
  const torch::Tensor& gradient = state_->entries[param].gradient;
  if (!gradient.defined() || gradient.scalar_type() != at::kFloat || !gradient.is_cpu() || !gradient.is_contiguous())
    return {};
  return {gradient.data_ptr(), gradient.numel(), ZR_F32, 0, kHostMemory};
}

void TorchModel::copy_gradient(uint32_t param, int64_t first, const zr_view& dst) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const torch::Tensor& gradient = state_->entries[param].gradient;
  if (!state_->uses_engine_memory() && gradient.scalar_type() == torch_type(dst.dtype)) {
    const auto size = static_cast<int64_t>(gradient.element_size());
    return copy_bytes(dst.data, static_cast<const char*>(gradient.data_ptr()) + first * size, dst.count * size,
                      state_->parallel_for);
  }
  if (state_->keeps_on_device) return state_->memory->copy_later(gradient, first, dst);
  state_->over(dst).copy_(part_of(gradient, first, dst.count));
}

void TorchModel::add_gradient(uint32_t param, int64_t first, const zr_view& dst) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const torch::Tensor& gradient = state_->entries[param].gradient;
  // Adds in fp32 and rounds once, for any two types.
  if (state_->keeps_on_device) state_->memory->flush();
  const auto scope = state_->engine_stream();
  state_->over(dst).add_(part_of(gradient, first, dst.count));
}

void TorchModel::drop_gradient(uint32_t param) { state_->entries[param].gradient = torch::Tensor(); }

Model::Temporaries TorchModel::temporaries() const { return {TorchMemory::held(), TorchMemory::peak()}; }
void TorchModel::limit_temporaries(int64_t bytes, const std::function<void(int64_t requested)>& over) {
  TorchMemory::limit(bytes, over);
}

void TorchModel::offload_saved_tensors(OffloadCallbacks callbacks) {
  state_->saved_tensor_offload.reset();
  if (callbacks.put)
    state_->saved_tensor_offload = std::make_unique<SavedTensorOffload>(std::move(callbacks), state_->buffers);
}

void TorchModel::seed(uint64_t seed) { seed_generators(seed); }

}  // namespace zr::host::model
