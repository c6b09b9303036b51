#include "model/placeholder.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <vector>

#include "model/process_setup.hpp"

namespace zr::host::model {

namespace {

// TensorImpl::key_set_ is protected: a pointer to it formed in a derived class is legal C++.
struct KeySet : c10::TensorImpl {
  static c10::DispatchKeySet& of(c10::TensorImpl& tensor) { return tensor.*(&KeySet::key_set_); }
};

// The flags that make reads of a storage's pointer throw are private up to libtorch 2.11, whose API can set but not
// clear them. An explicit instantiation may name a private member. The mutable accessors (data_ptr(), mutable_data())
// check the first flag only if the second one is set.
bool c10::StorageImpl::*throws_on_read();
bool c10::StorageImpl::*checks_mutable();
template <bool c10::StorageImpl::*Read, bool c10::StorageImpl::*Mutable>
struct PrivateMembers {
  friend bool c10::StorageImpl::*throws_on_read() { return Read; }
  friend bool c10::StorageImpl::*checks_mutable() { return Mutable; }
};
template struct PrivateMembers<&c10::StorageImpl::throw_on_immutable_data_ptr_,
                               &c10::StorageImpl::has_mutable_data_ptr_check_>;

}  // namespace

void Placeholder::free_reference(void* placeholder) {
  auto* self = static_cast<Placeholder*>(placeholder);
  if (--self->references_ == 0) delete self;
}

at::DataPtr Placeholder::pointer(void* memory) {
  ++references_;
  return {memory, this, &free_reference, device_};
}

at::Tensor Placeholder::make(at::IntArrayRef sizes, const at::TensorOptions& options, MemoryProvider* provider,
                             uint32_t index, std::string reason) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  return make(sizes, strides, options, provider, index, std::move(reason));
}

at::Tensor Placeholder::make(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options,
                             MemoryProvider* provider, uint32_t index, std::string reason) {
  ProcessSetup::intercept_placeholders();
  const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::DeferredInit);
  at::Tensor tensor = at::empty({0}, options);
  const auto bytes = static_cast<int64_t>(at::detail::computeStorageNbytes(sizes, strides, tensor.element_size()));
  auto* placeholder = new Placeholder(provider, index, std::move(reason));
  placeholder->device_ = tensor.device();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       placeholder->pointer(nullptr), nullptr, false);
  placeholder->storage_ = storage.get();
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(placeholder->reason_);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(std::move(storage)));
  impl->set_sizes_and_strides(sizes, strides);
  mark(tensor, true);
  return tensor;
}

Placeholder* Placeholder::find(c10::StorageImpl& storage) {
  at::DataPtr& pointer = storage._mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &free_reference ? static_cast<Placeholder*>(pointer.get_context()) : nullptr;
}

Placeholder* Placeholder::find(const at::TensorBase& tensor) {
  if (!is_marked(tensor) || !tensor.has_storage()) return nullptr;
  return find(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

void Placeholder::mark(const at::TensorBase& tensor, bool intercepted) {
  c10::DispatchKeySet& keys = KeySet::of(*tensor.unsafeGetTensorImpl());
  constexpr auto key = c10::DispatchKey::DeferredInit;
  keys = intercepted ? keys.add(key) : keys.remove(key);
}

void Placeholder::attach(void* memory) {
  set_readable(true);
  storage_->set_data_ptr_noswap(pointer(memory));
}

void Placeholder::detach() {
  set_readable(false);  // reads throw the message that make() set
  storage_->set_data_ptr_noswap(pointer(nullptr));
}

void Placeholder::set_readable(bool readable) {
  storage_->*throws_on_read() = !readable;
  storage_->*checks_mutable() = !readable;
}

void* Placeholder::memory() const { return storage_->_mutable_data_ptr_no_checks().mutable_get(); }

void Placeholder::keep(at::DataPtr memory) {
  set_readable(true);
  c10::StorageImpl& storage = *storage_;
  storage.set_allocator(c10::GetAllocator(device_.type()));
  storage.set_resizable(true);
  storage.set_data_ptr_noswap(std::move(memory));  // deletes this
}

void Placeholder::orphan(const std::string& reason) {
  provider_ = nullptr;
  reason_ = reason;
  detach();
  storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(reason);
}

}  // namespace zr::host::model
