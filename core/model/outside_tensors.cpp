#include "model/outside_tensors.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include "base/error.hpp"
#include "base/log.hpp"
#include "model/placeholder.hpp"
#include "model/saved_tensor_scope.hpp"

namespace zr::host::model {

namespace {
const char* const kRequiresGradients =
    "which is not its own and requires gradients, so it cannot be recomputed; change it outside the block";

// The memory of a storage as a tensor. Operators on it change no version counter and are not recorded by autograd.
torch::Tensor memory_of(const c10::Storage& storage) {
  torch::Tensor bytes = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(storage.device()));
  auto* const impl = bytes.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return bytes;
}

std::shared_ptr<torch::autograd::hooks_list> hooks_of(const torch::Tensor& tensor) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta ? meta->cpp_hooks_list_ : nullptr;
}

// Autocast is enabled for a type of device, and keeps casts.
bool keeps_casts() {
  const auto disabled = c10::impl::tls_local_dispatch_key_set().excluded_;
  return !disabled.has_all(c10::autocast_dispatch_keyset) && at::autocast::is_autocast_cache_enabled();
}

// Conditions under which autocast keeps the cast of an argument.
bool is_cast_kept(const torch::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.requires_grad() && tensor.is_leaf() && !tensor.is_view();
}
}  // namespace

OutsideTensors::OutsideTensors(const std::vector<torch::Tensor>& inputs) {
  used_.reserve(64);
  for (const torch::Tensor& input : inputs) {
    if (!input.defined() || input.is_inference()) continue;
    const TensorVersion version(input);
    used_.insert_or_assign(version.counter(), Used{version, {}, true, true, is_free_to_save(input), false});
    keep_hooks(input);
  }
}

void OutsideTensors::refuse(const std::string& reason) {
  if (refusal_.empty()) refusal_ = reason;
}

void OutsideTensors::begins(const OperatorCall& call) {
  if (call.depth == 1) {
    for (std::size_t i = 0; i < call.arguments.size(); ++i)
      each_tensor(call.arguments[i], [&](const torch::Tensor& tensor) { sees(tensor, call.writes(i)); });
  }
  if (call.depth == 1) autocast_ = keeps_casts();
  met_cast_cache_ |= autocast_;
  if (autocast_) check_cast(call);
}

void OutsideTensors::sees(const torch::Tensor& tensor, bool written) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (!counter.enabled()) return;
  const auto [at, is_new] = used_.try_emplace(TensorVersion::identity(counter));
  Used& used = at->second;
  if (is_new) used.version = TensorVersion(tensor);
  if (!used.outside) return;
  used.parameter |= is_free_to_save(tensor);  // also its views and detach() count as the parameter
  keep_hooks(tensor);
  if (written && !used.copied) changes(tensor, used);
}

// Tensors that share a counter may have hooks of their own.
void OutsideTensors::keep_hooks(const torch::Tensor& tensor) {
  if (tensor.requires_grad()) with_hooks_.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
}

void OutsideTensors::refuse_change(const Used& used, const std::string& reason) {
  refuse("the block of zr::checkpoint changes " + used.version.tensor() + " in place, " + reason);
}

void OutsideTensors::changes(const torch::Tensor& tensor, Used& used) {
  if (used.input) return refuse_change(used, "which is one of its inputs, so it cannot be recomputed; change a copy");
  if (used.parameter || tensor.requires_grad()) return refuse_change(used, kRequiresGradients);
  if (!tensor.has_storage()) return;
  try {
    const at::AutoDispatchBelowADInplaceOrView plain;
    changed_.push_back({tensor.storage(), memory_of(tensor.storage()).clone(), TensorVersion(tensor)});
    used.copied = true;
  } catch (const std::exception& exception) {
    refuse_change(used, std::string("and it could not be copied before: ") + exception.what());
  }
}

// Autocast may take the cast of a parameter from its cache, where it may be older than the parameter's value. The block
// would then see another value when it runs again.
void OutsideTensors::check_cast(const OperatorCall& call) {
  if (call.depth == 1) {
    outer_name_ = call.traits.name;
    outer_arguments_.clear();
    for (const c10::IValue& argument : call.arguments)
      each_tensor(argument, [&](const torch::Tensor& tensor) { outer_arguments_.push_back(tensor); });
    return;
  }
  if (call.depth != 2) return;
  if (call.traits.casts) {
    const torch::Tensor& source = call.arguments[0].toTensor();
    if (is_cast_kept(source)) casts_.insert_or_assign(TensorVersion(source).counter(), TensorVersion(source));
    return;
  }
  if (call.traits.name != outer_name_) return;
  std::size_t i = 0;
  for (const c10::IValue& argument : call.arguments)
    each_tensor(argument, [&](const torch::Tensor& cast) {
      if (i >= outer_arguments_.size()) return;
      const torch::Tensor& source = outer_arguments_[i++];
      if (source.scalar_type() == cast.scalar_type() || !is_cast_kept(source) || Placeholder::find(source)) return;
      const auto made = casts_.find(TensorVersion(source).counter());
      if (made != casts_.end() && made->second.is_current()) return;
      const at::AutoDispatchBelowAutograd plain;
      if (!at::equal(source.to(cast.scalar_type()), cast))
        refuse("the block of zr::checkpoint used " + TensorVersion(source).tensor() +
               " under autocast, whose cache holds a cast of its earlier values, so the block cannot be recomputed; "
               "call at::autocast::clear_cache() after each change of the parameter");
    });
}

void OutsideTensors::ended(const std::vector<c10::IValue>& results) {
  for (const c10::IValue& result : results)
    each_tensor(result, [&](const torch::Tensor& tensor) {
      const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
      if (!counter.enabled()) return;
      const auto [at, is_new] = used_.try_emplace(TensorVersion::identity(counter));
      Used& used = at->second;
      if (is_new) {
        used.counter = counter;
        used.outside = false;
      } else if (used.copied && tensor.requires_grad()) {
        refuse_change(used, kRequiresGradients);
      }
    });
  outer_arguments_.clear();
}

void OutsideTensors::end() {
  std::erase_if(used_, [](const auto& item) { return !item.second.outside || item.second.copied; });
  outer_arguments_.clear();
  casts_.clear();
}

void OutsideTensors::check() const {
  if (!refusal_.empty()) fail_user(refusal_);
  for (const auto& item : used_) {
    const Used& used = item.second;
    if (used.version.is_current()) continue;
    if (used.input)
      fail_user(
          "an input of zr::checkpoint was changed in place after the block had run, so the block cannot be recomputed; "
          "change a copy of the input");
    fail_user("the block of zr::checkpoint uses " + used.version.tensor() +
              " that was changed in place after the block had run, so the block cannot be recomputed; change it after "
              "backward, or change a copy");
  }
}

OutsideTensors::Restored::Restored(const OutsideTensors& outside) : outside_(outside) {
  const at::AutoDispatchBelowADInplaceOrView plain;
  for (const Changed& changed : outside.changed_) {
    if (changed.storage.nbytes() != static_cast<std::size_t>(changed.bytes.numel()))
      fail_user("the block of zr::checkpoint changes " + changed.version.tensor() +
                " in place, and it was resized after the block had run, so the block cannot be recomputed");
    versions_.push_back(changed.version.now());
    bytes_.push_back(memory_of(changed.storage).clone());
  }
  for (auto at = outside.changed_.rbegin(); at != outside.changed_.rend(); ++at) {  // the oldest change last
    memory_of(at->storage).copy_(at->bytes);
    at->version.restore();  // blocks in this block then meet the same versions as in the first run
  }
  for (const auto& item : outside.with_hooks_)
    if (const auto tensor = item.second.lock()) {
      auto list = hooks_of(torch::Tensor(tensor));
      if (list) hooks_.emplace_back(list, list->size());
    }
}

OutsideTensors::Restored::~Restored() {
  const at::AutoDispatchBelowADInplaceOrView plain;
  log_exception_of([&] {
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      memory_of(outside_.changed_[i].storage).copy_(bytes_[i]);
      versions_[i].restore();
    }
  });
  for (const auto& [list, size] : hooks_)
    if (list->size() > size) list->resize(size);
}

}  // namespace zr::host::model
