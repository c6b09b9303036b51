// Construction's operators that change the shape or storage of a tensor: they happen at once.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

#include "model/deferred_call.hpp"
#include "model/shape_call.hpp"

namespace zr::host::model {

void Construction::change_metadata(Call& call) {
  const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::DeferredInit);
  const at::Tensor self = call.argument(0).toTensor();
  if (call.name().rfind("aten::resize_", 0) == 0) {
    check_leaf(self);
    TORCH_CHECK(!self.requires_grad(), "cannot resize variables that require grad");
    close_pointers(*storage_impl(self));
    ShapeCall meta(call.op, *call.stack);
    meta.run();
    meta.resize_arguments();
    torch::jit::drop(*call.stack, call.count);
    return void(call.stack->emplace_back(self));
  }
  if (call.name() == "aten::set_" && call.count == 1) {
    check_leaf(self);
    self.unsafeGetTensorImpl()->set_storage_keep_dtype(placeholder(at::empty({0}, self.options()), call).storage());
    self.unsafeGetTensorImpl()->set_storage_offset(0);
    return self.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  }
  if (call.name() == "aten::set_") return set_storage(call, self);
  call.redispatch();
}

// The bytes of storage that set_() with these arguments needs; 0 if it takes what there is.
std::size_t Construction::bytes_of_set(const Call& call, const at::Tensor& self) {
  at::Tensor shape = at::empty({0}, self.options().device(at::kMeta).requires_grad(false));
  int64_t offset = 0;
  if (call.count > 3) {
    const std::vector<int64_t> sizes = call.argument(3).toIntVector(), strides = call.argument(4).toIntVector();
    shape.resize_(sizes);
    if (!strides.empty()) shape.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    offset = call.argument(2).toInt();
  } else if (call.argument(1).isTensor()) {
    const at::Tensor& source = call.argument(1).toTensor();
    shape.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides());
    offset = source.storage_offset();
  }
  return shape.numel() == 0 ? 0
                            : at::detail::computeStorageNbytes(shape.sizes(), shape.strides(), self.element_size(),
                                                               static_cast<std::size_t>(offset));
}

// set_() with a source. libtorch compares the data pointers of the two storages, so they must be one before.
void Construction::set_storage(Call& call, const at::Tensor& self) {
  const c10::Storage before = self.storage();  // NOLINT: a copy, because the tensor's storage is replaced
  const c10::IValue& from = call.argument(1);
  const c10::Storage source = from.isTensor() ? from.toTensor().storage() : from.toStorage();
  check_leaf(self);
  if (Placeholder::find(*source.unsafeGetStorageImpl())) {
    close_pointers(*source.unsafeGetStorageImpl());
    grow(source, bytes_of_set(call, self));
  }
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  try {
    call.redispatch();
  } catch (...) {
    self.unsafeGetTensorImpl()->set_storage_keep_dtype(before);
    throw;
  }
  Placeholder::mark(self, placeholder_of(self) != nullptr);
}

}  // namespace zr::host::model
