#include "model/shape_call.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "model/temporary.hpp"

namespace zr::host::model {

namespace {
// Gives the tensor the sizes, strides and offset (plus `shift`) of `other`, and enlarges its storage if it is too
// small.
void take_shape(const at::Tensor& tensor, const at::Tensor& other, int64_t shift) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const int64_t offset = other.storage_offset() + shift;
  if (other.numel() > 0)
    grow(tensor.storage(), at::detail::computeStorageNbytes(other.sizes(), other.strides(), tensor.element_size(),
                                                            static_cast<std::size_t>(offset)));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(other.sizes(), other.strides());
}
}  // namespace

ShapeCall::ShapeCall(const c10::OperatorHandle& op, const Stack& stack, On on) : op_(op), on_(on) {
  const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::DeferredInit);
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    if (on == On::meta && arguments[i].name() == "device")
      values_.emplace_back(c10::Device(c10::kMeta));
    else if (on == On::meta && value.isGenerator())
      values_.emplace_back();  // of another device
    else
      values_.push_back(map_tensors(value, [&](const at::Tensor& tensor) { return other_for(tensor); }));
  }
}

at::Tensor ShapeCall::other_for(const at::Tensor& tensor) {
  for (const Argument& known : arguments_)
    if (known.original.is_same(tensor)) return known.other;
  const at::Tensor other = on_ == On::meta          ? make_meta(tensor)
                           : placeholder_of(tensor) ? filled_temporary_like(tensor)
                                                    : tensor;
  arguments_.push_back({tensor, other, tensor.storage_offset() - other.storage_offset()});
  return other;
}

at::Tensor ShapeCall::make_meta(const at::Tensor& tensor) {
  at::Tensor meta = at::empty({0}, tensor.options().device(at::kMeta).requires_grad(false));
  const c10::StorageImpl* storage = storage_impl(tensor);
  if (!storage) return meta;
  c10::Storage& shared = storages_[storage];
  if (!shared)
    shared = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(storage->nbytes()),
        c10::GetAllocator(at::kMeta)->allocate(0), c10::GetAllocator(at::kMeta), /*resizable=*/true));
  c10::TensorImpl* impl = meta.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(shared);
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  copy_wrapped_number(tensor, meta);
  if (tensor.is_conj()) meta._set_conj(true);
  if (tensor.is_neg()) meta._set_neg(true);
  return meta;
}

void ShapeCall::run() {
  const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::DeferredInit);
  const at::NoGradGuard no_grad;
  op_.callBoxed(values_);
}

at::Tensor ShapeCall::argument(const at::Tensor& result) const {
  const auto found =
      std::find_if(arguments_.begin(), arguments_.end(), [&](const Argument& a) { return a.other.is_same(result); });
  return found == arguments_.end() ? at::Tensor() : found->original;
}

at::Tensor ShapeCall::alias(const at::Tensor& result) const {
  const c10::StorageImpl* storage = storage_impl(result);
  const auto found = std::find_if(arguments_.begin(), arguments_.end(),
                                  [&](const Argument& a) { return storage && storage_impl(a.other) == storage; });
  if (found == arguments_.end()) return {};
  at::Tensor alias = snapshot(found->original);
  take_shape(alias, result, found->shift);
  return alias;
}

void ShapeCall::resize_arguments() const {
  for (const Argument& a : arguments_)
    if (a.other.sizes() != a.original.sizes() || a.other.strides() != a.original.strides() ||
        a.other.storage_offset() + a.shift != a.original.storage_offset())
      take_shape(a.original, a.other, a.shift);
}

void grow(const c10::Storage& storage, std::size_t bytes) {
  if (storage.nbytes() < bytes) storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

}  // namespace zr::host::model
