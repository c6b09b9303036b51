#include "model/torch_model.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <mutex>

#include "base/failure.hpp"
#include "base/log.hpp"

namespace zr::host {

namespace {

at::ScalarType torch_type(zr_dtype dtype) {
  switch (dtype) {
    case ZR_F32: return at::kFloat;
    case ZR_BF16: return at::kBFloat16;
    case ZR_F16: return at::kHalf;
    default: fail_bug("weights are fp32, bf16 or fp16, not dtype " + std::to_string(dtype));
  }
}

// Fires when autograd has accumulated into one parameter's .grad.
class Hook final : public torch::autograd::FunctionPostHook {
 public:
  explicit Hook(std::function<void()> fired) : fired_(std::move(fired)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    fired_();
    return outputs;
  }

 private:
  std::function<void()> fired_;
};

}  // namespace

struct TorchModel::State {
  struct Slot {
    torch::Tensor tensor;
    // The accumulator must be kept alive: a fresh one would not know the hook.
    decltype(torch::autograd::impl::grad_accumulator(std::declval<torch::Tensor>())) accumulator;
    std::uintptr_t hook = 0;
    torch::Tensor gradient;  // of this backward, as autograd handed it over
    bool densified = false;
  };
  std::vector<Parameter> parameters;
  std::vector<Slot> slots;
  std::vector<std::pair<std::string, torch::Tensor>> buffers;
  Arrived arrived;
  std::mutex mutex;

  void fired(uint32_t param) {
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
};

TorchModel::TorchModel(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                       const std::vector<std::pair<std::string, torch::Tensor>>& buffers, zr_dtype dtype)
    : state_(std::make_unique<State>()) {
  std::map<const c10::TensorImpl*, std::size_t> seen;
  for (auto& [name, tensor] : parameters) {
    if (const auto at = seen.find(tensor.unsafeGetTensorImpl()); at != seen.end()) {
      state_->parameters[at->second].aliases.push_back(name);
      continue;
    }
    if (!tensor.defined() || !tensor.is_floating_point() || tensor.is_sparse() || !tensor.device().is_cpu())
      fail_user("parameter '" + name +
                "' is not a dense floating-point tensor in CPU memory; register it as a buffer, or convert it before "
                "the engine is made");
    if (tensor.grad_fn())
      fail_user("parameter '" + name + "' is not a leaf of autograd; register the tensor it is computed from");
    seen.emplace(tensor.unsafeGetTensorImpl(), state_->slots.size());
    state_->parameters.push_back({name, {}, tensor.sizes().vec(), tensor.numel(), !tensor.requires_grad(), 0});
    state_->slots.push_back({tensor, nullptr, 0, {}, false});
  }
  for (auto& [name, tensor] : buffers) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    if (tensor.is_floating_point() && dtype != ZR_F32) tensor.set_data(tensor.to(torch_type(dtype)));
    if (!tensor.is_contiguous()) tensor.set_data(tensor.contiguous());
    state_->buffers.emplace_back(name, tensor);
  }
}

TorchModel::~TorchModel() {
  for (auto& slot : state_->slots)
    if (slot.accumulator && slot.hook) slot.accumulator->del_post_hook(slot.hook);
}

const std::vector<Parameter>& TorchModel::parameters() const { return state_->parameters; }

std::vector<ModelBuffer> TorchModel::buffers() {
  std::vector<ModelBuffer> list;
  for (auto& [name, tensor] : state_->buffers)
    list.push_back({name, tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes())});
  return list;
}

void TorchModel::read(uint32_t param, float* out) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& tensor = state_->slots[param].tensor;
  torch::from_blob(out, tensor.sizes(), at::kFloat).copy_(tensor.detach());
}

void TorchModel::bind(uint32_t param, void* memory, zr_dtype dtype) {
  torch::Tensor& tensor = state_->slots[param].tensor;
  tensor.set_data(torch::from_blob(memory, tensor.sizes(), torch_type(dtype)));
}

void TorchModel::release() {
  for (auto& slot : state_->slots) slot.tensor.set_data(slot.tensor.detach().clone());
}

void TorchModel::on_gradient(Arrived arrived) {
  state_->arrived = std::move(arrived);
  for (uint32_t i = 0; i < state_->slots.size(); ++i) {
    auto& slot = state_->slots[i];
    if (state_->parameters[i].frozen || slot.accumulator) continue;
    slot.accumulator = torch::autograd::impl::grad_accumulator(slot.tensor);
    slot.hook = slot.accumulator->add_post_hook(std::make_unique<Hook>([state = state_.get(), i] { state->fired(i); }));
  }
}

void TorchModel::copy_gradient(uint32_t param, int64_t first, const zr_view& dst) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& gradient = state_->slots[param].gradient;
  torch::from_blob(dst.data, {dst.count}, torch_type(dst.dtype))
      .copy_(gradient.reshape({-1}).narrow(0, first, dst.count));
}

void TorchModel::add_gradient(uint32_t param, int64_t first, const zr_view& dst) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& gradient = state_->slots[param].gradient;
  torch::from_blob(dst.data, {dst.count}, at::kFloat).add_(gradient.reshape({-1}).narrow(0, first, dst.count));
}

void TorchModel::drop_gradient(uint32_t param) { state_->slots[param].gradient = torch::Tensor(); }

void TorchModel::seed(uint64_t seed) {
  auto generator = at::globalContext().defaultGenerator(at::kCPU);
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

}  // namespace zr::host
