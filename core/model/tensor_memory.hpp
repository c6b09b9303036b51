// Which memory a tensor has and which part of it, without keeping the tensor alive.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/types.h>

#include <cstdint>
#include <vector>

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

/// The part of a storage that a strided tensor shows: t_() or resize_() change it. Does not keep the tensor alive.
struct TensorLayout {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
  c10::Storage storage;
  std::vector<int64_t> sizes, strides;
  int64_t offset;

  /// The layout that the tensor has now.
  explicit TensorLayout(const torch::Tensor& of)
      : tensor(of.getIntrusivePtr()),
        storage(of.storage()),
        sizes(of.sizes().vec()),
        strides(of.strides().vec()),
        offset(of.storage_offset()) {}
  /// Gives it back to the tensor, if that still exists.
  void restore() const {
    const auto impl = tensor.lock();
    if (!impl) return;
    impl->set_storage_keep_dtype(storage);
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
};

}  // namespace zr::host::model
