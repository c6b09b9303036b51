// The tensors among the arguments and results of an operator.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <optional>

#include "model/intercept.hpp"

namespace zr::host::model {

/// The value with fn(tensor) in place of each defined tensor, also in lists.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, F&& fn) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(fn(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? fn(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(fn(*tensor)) : tensor);
    return list;
  }
  return value;
}

/// Calls fn(tensor, i) for each defined tensor of the last `n` values; i: the index of its value among them.
template <class F>
void for_each_tensor(const Stack& stack, std::size_t n, F&& fn) {
  const std::size_t first = stack.size() - n;
  for (std::size_t i = 0; i < n; ++i)
    map_tensors(stack[first + i], [&](const at::Tensor& tensor) {
      fn(tensor, i);
      return tensor;
    });
}

/// The tensor's storage; null if it has none (sparse tensors).
inline c10::StorageImpl* storage_impl(const at::TensorBase& tensor) {
  return tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

/// The placeholder of the tensor's storage, whether its operators are intercepted or not; null if it is ordinary.
inline Placeholder* placeholder_of(const at::TensorBase& tensor) {
  c10::StorageImpl* storage = storage_impl(tensor);
  return storage ? Placeholder::find(*storage) : nullptr;
}

/// Another tensor object with the sizes, strides, offset, dtype and storage that the tensor has now.
inline at::Tensor snapshot(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0),
                                                                          /*allow_tensor_metadata_change=*/true));
}

/// Marks `copy` as a number that libtorch made a tensor of (which matters for result types), if the tensor is one.
inline void copy_wrapped_number(const at::Tensor& tensor, const at::Tensor& copy) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
}

}  // namespace zr::host::model
