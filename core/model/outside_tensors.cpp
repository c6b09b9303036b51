#include "model/outside_tensors.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string_view>

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

// The storage may have grown since the bytes were copied: resize_() in the block.
void set_bytes(const c10::Storage& storage, const torch::Tensor& bytes) {
  const int64_t count = std::min(static_cast<int64_t>(storage.nbytes()), bytes.numel());
  memory_of(storage).narrow(0, 0, count).copy_(bytes.narrow(0, 0, count));
}

std::shared_ptr<torch::autograd::hooks_list> hooks_of(const torch::Tensor& tensor) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta ? meta->cpp_hooks_list_ : nullptr;
}

// Nothing tells how long this memory exists: that of from_blob() without a deleter.
bool has_no_owner(const c10::Storage& storage) {
  const at::DataPtr& memory = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return memory.get() != nullptr && memory.get_context() == nullptr;
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
  for (const torch::Tensor& input : inputs) {
    if (!input.defined() || input.is_inference()) continue;
    const TensorVersion version(input);
    used_.insert_or_assign(version.counter(), Used{version, true, is_free_to_save(input)});
    meets(input, false);
    keep_hooks(input);
  }
}

void OutsideTensors::refuse(const std::string& reason) {
  if (refusal_.empty()) refusal_ = reason;
}

void OutsideTensors::begins(const OperatorCall& call) {
  if (call.depth == 1) {
    for (std::size_t i = 0; i < call.arguments.size(); ++i)
      each_tensor(call.arguments[i], [&](const torch::Tensor& tensor) { sees(tensor, call, call.writes(i)); });
  }
  if (call.depth == 1) autocast_ = keeps_casts();
  met_cast_cache_ |= autocast_;
  if (autocast_) check_cast(call);
}

// A version counter alone does not tell whether the block made a tensor: the factories of torch:: and data() may give
// the memory another one.
void OutsideTensors::sees(const torch::Tensor& tensor, const OperatorCall& call, bool written) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (!counter.enabled()) return;
  auto at = used_.find(TensorVersion::identity(counter));
  if (at == used_.end()) {
    const auto met = first_met_.find(memory_identity(tensor));
    if (met != first_met_.end() && met->second.own) return;
    at = used_.emplace(TensorVersion::identity(counter), Used{TensorVersion(tensor)}).first;
    meets(tensor, false);
  }
  Used& used = at->second;
  used.parameter |= is_free_to_save(tensor);  // also its views and detach() count as the parameter
  keep_hooks(tensor);
  if (!written) return;
  if (!used.copied) changes(tensor, used, call);
  if (call.traits.reshapes && refusal_.empty()) keep_layout(tensor);
}

void OutsideTensors::meets(const torch::Tensor& tensor, bool own) {
  c10::intrusive_ptr_target* const memory = memory_identity(tensor);
  if (first_met_.find(memory) == first_met_.end()) first_met_.emplace(memory, MetMemory{weak_memory(memory), own});
}

void OutsideTensors::keep_layout(const torch::Tensor& tensor) {
  if (tensor.has_storage() && !tensor.is_nested()) layouts_.emplace_back(tensor);
}

// Tensors that share a counter may have hooks of their own.
void OutsideTensors::keep_hooks(const torch::Tensor& tensor) {
  if (tensor.requires_grad()) with_hooks_.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
}

void OutsideTensors::refuse_change(const Used& used, const std::string& reason) {
  refuse("the block of zr::checkpoint changes " + used.version.tensor() + " in place, " + reason);
}

void OutsideTensors::changes(const torch::Tensor& tensor, Used& used, const OperatorCall& call) {
  if (call.traits.name == std::string_view("aten::embedding_renorm_"))
    return refuse_change(used,
                         "to apply an Embedding's max_norm (torch::embedding_renorm_), so it cannot be recomputed; "
                         "call the Embedding outside the block, or leave out max_norm");
  if (used.input) return refuse_change(used, "which is one of its inputs, so it cannot be recomputed; change a copy");
  if (used.parameter || tensor.requires_grad()) return refuse_change(used, kRequiresGradients);
  if (!tensor.has_storage()) return;
  try {
    const at::AutoDispatchBelowADInplaceOrView plain;
    const c10::Storage& storage = tensor.storage();
    const TensorVersion version(tensor);
    changed_.push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl()),
                        memory_of(storage).clone(), version, version, 0});
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
      const auto at = used_.find(TensorVersion::identity(counter));
      if (at == used_.end())
        meets(tensor, true);
      else
        at->second.gradients |= at->second.copied && tensor.requires_grad();
    });
  outer_arguments_.clear();
}

void OutsideTensors::end() {
  end_changes();
  std::erase_if(used_, [](const auto& item) { return item.second.copied; });
  for (const auto& [identity, met] : first_met_)
    if (!met.own || !met.memory.expired()) met_.emplace(identity, met);
  first_met_ = {};
  outer_arguments_.clear();
  casts_.clear();
}

// Tensors that no longer exist were made by the block, though not by an operator: from_blob().
void OutsideTensors::end_changes() {
  std::erase_if(changed_, [](const Changed& changed) { return changed.storage.expired(); });
  for (Changed& changed : changed_) {
    const auto impl = changed.storage.lock();
    if (!impl) continue;
    const c10::Storage storage(impl);
    changed.end = changed.version.now();
    changed.nbytes = storage.nbytes();
    const Used& used = used_.at(changed.version.counter());
    if (used.gradients) refuse_change(used, kRequiresGradients);
    if (has_no_owner(storage))
      refuse_change(used,
                    "whose memory libtorch does not own (from_blob), so it cannot be recomputed; give from_blob a "
                    "deleter that keeps the memory alive, or change a clone()");
  }
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
  std::vector<const Changed*> first;
  for (const Changed& changed : outside.changed_) {
    const auto impl = changed.storage.lock();
    if (!impl) continue;
    const c10::Storage storage(impl);
    if (storage.nbytes() != changed.nbytes)
      fail_user("the block of zr::checkpoint changes " + changed.version.tensor() +
                " in place, and it was resized after the block had run, so the block cannot be recomputed");
    before_.push_back({storage, memory_of(storage).clone(), changed.version.now()});
    first.push_back(&changed);
  }
  for (const TensorLayout& layout : outside.layouts_)
    if (const auto tensor = layout.tensor.lock()) layouts_.emplace_back(torch::Tensor(tensor));
  for (std::size_t i = first.size(); i-- > 0;) {  // the oldest change last
    set_bytes(before_[i].storage, first[i]->bytes);
    first[i]->version.restore();  // blocks in this block then meet the same versions as in the first run
  }
  for (auto at = outside.layouts_.rbegin(); at != outside.layouts_.rend(); ++at) at->restore();
  for (const auto& item : outside.with_hooks_)
    if (const auto tensor = item.second.lock()) {
      auto list = hooks_of(torch::Tensor(tensor));
      if (list) hooks_.emplace_back(list, list->size());
    }
}

void OutsideTensors::Restored::check() const {
  for (const Changed& changed : outside_.changed_)
    if (!changed.end.is_current())
      fail_user("the block of zr::checkpoint changed " + changed.version.tensor() +
                " in place, but not as often when it was recomputed as in its first run; the block may depend only on "
                "its inputs and on tensors, not on variables that it changes");
}

OutsideTensors::Restored::~Restored() {
  const at::AutoDispatchBelowADInplaceOrView plain;
  log_exception_of([&] {
    for (const Before& before : before_) {
      set_bytes(before.storage, before.bytes);
      before.version.restore();
    }
    for (const TensorLayout& layout : layouts_) layout.restore();
  });
  for (const auto& [list, size] : hooks_)
    if (list->size() > size) list->resize(size);
}

}  // namespace zr::host::model
