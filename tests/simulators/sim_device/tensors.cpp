// Tensors on the device: creation, views, storages and copies.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <cstring>

#include "sim.hpp"

namespace zr::test::sim {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current_device();
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> /*pin*/,
                 std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "sim: only strided tensors are supported");
  const c10::DeviceGuard guard(c10::Device(kSim, index_of(device)));
  return at::detail::empty_generic(sizes, &allocator(), kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout> /*layout*/, std::optional<c10::Device> device,
                         std::optional<bool> /*pin*/) {
  return empty_strided_on(index_of(device), sizes, strides, c10::dtype_or_default(type));
}

// Sets sizes and strides; the storage grows if it is too small.
void reshape_to(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytes(sizes, strides, self.dtype().itemsize(),
                                                      static_cast<std::size_t>(self.storage_offset()));
  impl.set_sizes_and_strides(sizes, strides);
  if (self.numel() > 0 && bytes > self.storage().nbytes())
    resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != sizes) reshape_to(self, sizes, c10::contiguous_strides(sizes));
  if (format.has_value() && *format != at::MemoryFormat::Preserve)
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                               at::IntArrayRef strides) {
  TORCH_CHECK(source.device() == self.device(), "sim: set_() needs a storage on ", self.device(), ", not on ",
              source.device());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  reshape_to(self, sizes, strides.size() == sizes.size() ? at::DimVector(strides) : c10::contiguous_strides(sizes));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  const at::Tensor none = at::empty({0}, self.options());
  return set_storage_offset(self, none.storage(), 0, {0}, {1});
}

void record_stream(at::Tensor& self, at::Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }

// Copies between two devices run in the current stream of the source, ordered with that of the destination.
void copy_between(const at::Tensor& from, const at::Tensor& to) {
  StreamQueue& reader = current_queue(from.device().index());
  StreamQueue& writer = current_queue(to.device().index());
  const uint64_t before = writer.last_ticket();
  if (&reader != &writer)
    reader.enqueue(
        "wait", [&writer, before] { writer.wait(before); }, /*delayed=*/false);
  const uint64_t copied =
      reader.enqueue("copy_", [a = backing_tensor(from), b = backing_tensor(to)]() mutable { b.copy_(a); });
  if (&reader != &writer)
    writer.enqueue(
        "wait", [&reader, copied] { reader.wait(copied); }, /*delayed=*/false);
}

// The stream of a copy between host and device. With the defect "stream", another one than the current stream.
StreamQueue& copying_queue(c10::DeviceIndex device) {
  const c10::Stream current = current_stream(device);
  if (!has_defect("stream")) return stream_queue(current);
  const c10::StreamId other = current.id() == 0 ? 1 : 0;
  return stream_queue(c10::Stream(c10::Stream::UNSAFE, current.device(), other));
}

bool dense_pinned(const at::Tensor& host) { return is_pinned(host.storage().data()); }

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const bool read_host = from.is_cpu(), write_host = to.is_cpu();
  TORCH_CHECK(read_host || from.device().type() == kSim, "sim: cannot copy from ", from.device());
  TORCH_CHECK(write_host || to.device().type() == kSim, "sim: cannot copy to ", to.device());
  if (!read_host && !write_host) {
    copy_between(from, to);
    return to;
  }
  StreamQueue& queue = copying_queue((read_host ? to : from).device().index());
  if (has_defect("host")) static_cast<void>(*static_cast<const volatile char*>((read_host ? to : from).data_ptr()));
  const bool pinned = dense_pinned(read_host ? from : to);
  // The task keeps the host tensor. Pageable sources are staged, as CUDA does.
  at::Tensor source = read_host ? from.detach() : backing_tensor(from);
  at::Tensor target = write_host ? to.detach() : backing_tensor(to);
  if (read_host && non_blocking && !pinned) source = from.detach().clone();
  const uint64_t ticket = queue.enqueue(
      "copy_", [source = std::move(source), target = std::move(target)]() mutable { target.copy_(source); });
  if (!non_blocking || (write_host && !pinned)) synchronize(queue, ticket);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
}

}  // namespace

at::Tensor empty_strided_on(c10::DeviceIndex device, at::IntArrayRef sizes, at::IntArrayRef strides,
                            at::ScalarType type) {
  const c10::DeviceGuard guard(c10::Device(kSim, device));
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), kKeys, type);
}

at::Tensor view_of(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset,
                   at::ScalarType type) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                             base.key_set(), c10::scalarTypeToTypeMeta(type));
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

void resize_storage(c10::StorageImpl& storage, std::size_t bytes) {
  TORCH_CHECK(storage.resizable(), "sim: the storage is not resizable");
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = allocator().allocate(bytes);
  const std::size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0)
    current_queue(storage.device().index()).enqueue("resize_", [to = data.get(), from = storage.data(), kept] {
      std::memcpy(backing(to), backing(from), kept);
    });
  storage.set_data_ptr(std::move(data));
  storage.set_nbytes(bytes);
}

at::Tensor Mirror::of(const at::Tensor& tensor) {
  const bool meta = kind_ == kMeta;
  c10::Storage& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
  if (!storage) {
    const std::size_t bytes = tensor.storage().nbytes();
    const auto type = meta ? c10::kMeta : c10::kCPU;
    void* const at = meta ? nullptr : backing(tensor.storage().data());
    storage = c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(at, c10::Device(type)),
                           meta ? c10::GetAllocator(c10::kMeta) : nullptr, /*resizable=*/meta);
  }
  at::Tensor copy = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU),
      tensor.dtype());
  c10::TensorImpl& impl = *copy.unsafeGetTensorImpl();
  impl.set_storage_offset(tensor.storage_offset());
  impl.set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl.set_wrapped_number(true);
  if (tensor.is_conj()) impl._set_conj(true);
  if (tensor.is_neg()) impl._set_neg(true);
  return copy;
}

}  // namespace zr::test::sim
