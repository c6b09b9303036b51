// TorchModel's list of parameters: which tensors of the program's model can be trained, and which are trained.
#include <algorithm>
#include <map>

#include "base/error.hpp"
#include "model/process_setup.hpp"
#include "model/torch_dtype.hpp"
#include "model/torch_state.hpp"

namespace zr::host::model {

namespace {
struct Listed {
  std::vector<plan::Parameter> parameters;
  Storages::Tensors tensors;  // each with its first name
};

// One parameter per tensor. Throws for tensors that cannot be trained.
Listed list(const Storages::Tensors& parameters, at::Device device) {
  Listed listed;
  std::map<const c10::TensorImpl*, std::size_t> seen;
  for (auto& [name, tensor] : parameters) {
    if (const auto at = seen.find(tensor.unsafeGetTensorImpl()); at != seen.end()) {
      listed.parameters[at->second].aliases.push_back(name);
      continue;
    }
    if (!tensor.defined() || !tensor.is_floating_point() || tensor.is_sparse())
      fail_user("parameter '" + name +
                "' is not a dense floating-point tensor; register it as a buffer, or convert it before the engine is "
                "made");
    if (!tensor.device().is_cpu() && tensor.device() != device)
      fail_user("parameter '" + name + "' is on the device " + tensor.device().str() + ", but the engine trains on " +
                device.str() + " (job.device); build the model on the CPU, and the engine moves it to job.device");
    if (tensor.grad_fn())
      fail_user("parameter '" + name +
                "' is not a leaf tensor of autograd; register the tensor that it is computed from");
    seen.emplace(tensor.unsafeGetTensorImpl(), listed.tensors.size());
    listed.parameters.push_back({name, {}, tensor.sizes().vec(), tensor.numel(), !tensor.requires_grad(), 0});
    listed.tensors.emplace_back(name, tensor);
  }
  return listed;
}

Storages::Tensors filled(Storages::Tensors buffers) {
  std::erase_if(buffers, [](const auto& item) { return !item.second.defined() || item.second.numel() == 0; });
  return buffers;
}

// The first entries, and how many more there are.
std::string first_of(const std::vector<std::string>& entries) {
  constexpr std::size_t kMaxListed = 5;
  std::string list;
  for (std::size_t i = 0; i < std::min(entries.size(), kMaxListed); ++i) list += (i ? ", " : "") + entries[i];
  if (entries.size() > kMaxListed) list += " and " + std::to_string(entries.size() - kMaxListed) + " more";
  return list;
}

void check_other_engine(const std::string& name, const torch::Tensor& tensor, const TorchModel* self) {
  const auto ref = ParameterRegistry::find(tensor.unsafeGetTensorImpl());
  if (ref && ref->model != self)
    fail_user("parameter '" + name +
              "' belongs to another zr::Engine; call release() on that engine first, or give each engine "
              "its own model");
  if (!ref && Storages::has_engine_memory(tensor))
    fail_user("parameter '" + name +
              "' shares memory with a parameter that a zr::Engine trains; destroy that engine first, or register a "
              "clone()");
}

void check_added(const char* what, const std::string& name, const torch::Tensor& tensor) {
  if (Construction::of(tensor))
    fail_user(std::string(what) + " '" + name +
              "' was built by zr::deferred, which engine.refresh() does not support; build tensors that are added "
              "during training without zr::deferred");
}
void check_dense(const Storages::Tensors& buffers) {
  for (const auto& [name, tensor] : buffers)
    if (tensor.defined() && (tensor.layout() != torch::kStrided || tensor.is_quantized()))
      fail_user("buffer '" + name + "' is " + (tensor.is_quantized() ? "quantized" : c10::str(tensor.layout())) +
                ", but the engine saves and broadcasts buffers as dense tensors; register its " +
                (tensor.is_quantized() ? "dequantize()" : "to_dense()") +
                ", or keep the tensor as a member of the module, without register_buffer()");
}
}  // namespace

void TorchModel::add_parameter(const std::string& name, const torch::Tensor& tensor, bool reloads) {
  // The engine that trained the parameter was destroyed. Fails on all ranks, before they compare anything.
  if (const Placeholder* left = reloads || Construction::of(tensor) ? nullptr : Placeholder::find(tensor);
      left && !left->provider())
    fail_user(left->reason());
  check_deferred("parameter '" + name + "'", tensor);
  check_other_engine(name, tensor, nullptr);
  auto& entry = state_->entries.emplace_back();
  entry.tensor = tensor;
  ParameterRegistry::add(tensor.unsafeGetTensorImpl(), {this, static_cast<uint32_t>(state_->entries.size() - 1)});
  const Placeholder* left = reloads ? Placeholder::find(tensor) : nullptr;
  if (!left || left->provider()) return;
  Placeholder::mark(tensor, false);
  entry.left_without_memory = true;
}

void TorchModel::add_buffers(const std::vector<std::pair<std::string, torch::Tensor>>& buffers) {
  check_dense(buffers);
  state_->buffers = filled(buffers);
  for (const auto& [name, tensor] : state_->buffers) check_deferred("buffer '" + name + "'", tensor);
  for (const auto& [name, tensor] : buffers) {
    if (!tensor.defined()) continue;
    state_->buffer_kinds.emplace(name, State::kind_of(tensor));
    if (tensor.numel() == 0)
      state_->empty_buffers.push_back({name, nullptr, 0, safetensors_name(tensor.scalar_type()), tensor.sizes().vec()});
  }
}

// Moves tensors without elements to the model's device: no memory of the engine is bound to them.
void TorchModel::move_empty(const std::vector<std::pair<std::string, torch::Tensor>>& tensors) {
  for (const auto& [name, tensor] : tensors)
    if (tensor.defined() && tensor.numel() == 0 && tensor.device() != state_->device && !Construction::of(tensor))
      Storages::set_data(tensor, at::empty(tensor.sizes(), state_->options(tensor.scalar_type())));
}

TorchModel::TorchModel(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                       const std::vector<std::pair<std::string, torch::Tensor>>& buffers,
                       const TorchModelOptions& options)
    : state_(std::make_unique<State>(options)) {
  ProcessSetup::count_cpu_memory();
  if (!options.device.is_cpu()) state_->memory.emplace(options.device);
  Listed listed = list(parameters, options.device);
  for (const auto& [name, tensor] : listed.tensors) add_parameter(name, tensor, options.reloads);
  state_->parameters = std::move(listed.parameters);
  add_buffers(buffers);
  state_->storages =
      std::make_unique<Storages>(listed.tensors, state_->buffers, [&](const c10::StorageImpl* storage) -> int64_t {
        return state_->construction ? state_->construction->references(storage) : 0;
      });
  if (!state_->construction) state_->convert_buffers();
  if (state_->is_on_cpu()) return;
  move_empty(parameters);
  move_empty(buffers);
}

std::vector<plan::Parameter> TorchModel::list_parameters(const Storages::Tensors& parameters,
                                                         const Storages::Tensors& buffers) const {
  Listed listed = list(parameters, state_->device);
  for (const auto& [name, tensor] : listed.tensors) {
    check_other_engine(name, tensor, this);
    check_added("parameter", name, tensor);
  }
  check_dense(buffers);
  const Storages::Tensors with_values = filled(buffers);
  for (const auto& [name, tensor] : with_values) check_added("buffer", name, tensor);
  const Storages check(listed.tensors, with_values);
  return std::move(listed.parameters);
}

void TorchModel::check_trained(const std::vector<std::pair<std::string, torch::Tensor>>& parameters) const {
  std::vector<std::string> untrained;
  for (const auto& [name, tensor] : parameters) {
    const auto ref = ParameterRegistry::find(tensor.unsafeGetTensorImpl());
    if (ref && ref->model == this) {
      const plan::Parameter& known = state_->parameters[ref->param];
      if (known.frozen && tensor.requires_grad() && known.name == name)
        untrained.push_back("'" + name + "' was frozen when the engine was made, and requires a gradient now");
      continue;
    }
    const bool replaced =
        std::any_of(state_->parameters.begin(), state_->parameters.end(), [&name = name](const plan::Parameter& known) {
          return known.name == name || std::count(known.aliases.begin(), known.aliases.end(), name) > 0;
        });
    untrained.push_back("'" + name + (replaced ? "' was replaced by another tensor" : "' was added to the model"));
  }
  if (untrained.empty()) return;
  fail_user("this engine does not train all parameters of its model, which changed after the engine was made: " +
            first_of(untrained) +
            "; call engine.refresh() on all ranks between two steps, or make the engine after the change");
}

namespace {
std::map<std::string, torch::Tensor> by_name(const Storages::Tensors& buffers) {
  std::map<std::string, torch::Tensor> tensors;
  for (const auto& [name, tensor] : buffers)
    if (tensor.defined()) tensors.emplace(name, tensor);
  return tensors;
}

bool is_like(const torch::Tensor& other, const torch::Tensor& tensor) {
  return other.sizes() == tensor.sizes() && other.scalar_type() == tensor.scalar_type() &&
         other.device() == tensor.device() && other.layout() == torch::kStrided;
}
}  // namespace

std::vector<std::string> TorchModel::changed_buffers(const Storages::Tensors& buffers) const {
  std::map<std::string, torch::Tensor> current = by_name(buffers);
  std::vector<std::string> changed, removed;
  const auto describe = [&](const std::string& name, const torch::Tensor& tensor, const char* what) {
    const std::string& before = state_->buffer_kinds.at(name);
    changed.push_back(
        "'" + name + "' " +
        (State::kind_of(tensor) == before ? what : "is now " + State::kind_of(tensor) + " and was " + before));
  };
  for (const auto& [name, tensor] : state_->buffers) {
    const auto found = current.find(name);
    if (found == current.end())
      removed.push_back("'" + name + "' was removed from the model");
    else if (!found->second.is_same(tensor) || State::kind_of(tensor) != state_->buffer_kinds.at(name))
      describe(name, found->second, "was replaced by another tensor");
    if (found != current.end()) current.erase(found);
  }
  for (const auto& [name, tensor] : current)
    if (const auto before = state_->buffer_kinds.find(name); before == state_->buffer_kinds.end()) {
      if (tensor.numel() > 0) changed.push_back("'" + name + "' was added to the model");
    } else if (before->second != State::kind_of(tensor)) {
      describe(name, tensor, "");
    }
  changed.insert(changed.end(), removed.begin(), removed.end());
  return changed;
}

void TorchModel::adopt_buffers(const Storages::Tensors& buffers) {
  std::map<std::string, torch::Tensor> current = by_name(buffers);
  bool replaced = false;
  for (auto& [name, tensor] : state_->buffers) {
    const auto found = current.find(name);
    if (found == current.end() || found->second.is_same(tensor) || !is_like(found->second, tensor) ||
        Placeholder::find(found->second))
      continue;
    tensor = found->second;
    // The engine writes to buffers. It must not write to a batch or a parameter that the tensor is a view of.
    const c10::Storage& storage = tensor.storage();
    if (storage.use_count() > 1 || !storage.allocator() || !tensor.is_contiguous()) {
      const torch::NoGradGuard no_grad;
      tensor.set_data(tensor.detach().clone(at::MemoryFormat::Contiguous));
    }
    replaced = true;
  }
  if (replaced) state_->mark_kept_buffers();
}

void TorchModel::check_buffers(const Storages::Tensors& buffers) {
  adopt_buffers(buffers);
  const std::vector<std::string> changed = changed_buffers(buffers);
  if (changed.empty()) return;
  fail_user(
      "this engine does not use the current buffers of its model, which changed after the engine was made: " +
      first_of(changed) +
      "; call engine.refresh() on all ranks between two steps, or make the engine after the change; a forward() " +
      "that assigns its buffers must keep their shape and type");
}

bool TorchModel::has_buffers() const { return !state_->buffer_kinds.empty(); }

}  // namespace zr::host::model
