// Which memory a tensor has, without keeping that memory alive.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/types.h>

namespace zr::host::model {

/// Keeps the identity from being used again for other memory, but not the memory.
using WeakMemory = c10::weak_intrusive_ptr<c10::intrusive_ptr_target>;

/// The storage of the defined tensor, which its views, detach() and data() share; the tensor itself if it has none
/// (sparse tensors).
inline c10::intrusive_ptr_target* memory_identity(const torch::Tensor& tensor) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (!tensor.has_storage()) return impl;
  c10::StorageImpl* const storage = impl->unsafe_storage().unsafeGetStorageImpl();
  return storage ? static_cast<c10::intrusive_ptr_target*>(storage) : impl;
}

/// The caller has a tensor with this memory.
inline WeakMemory weak_memory(c10::intrusive_ptr_target* memory) {
  return WeakMemory::reclaim(c10::raw::intrusive_ptr::make_weak(memory));
}

}  // namespace zr::host::model
