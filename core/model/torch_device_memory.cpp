#include "model/torch_device_memory.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "model/device.hpp"
#include "model/device_copies.hpp"
#include "model/torch_copy_stream.hpp"
#include "model/torch_dtype.hpp"

namespace zr::host::model {

namespace {
c10::impl::VirtualGuardImpl guard_of(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

c10::Storage storage_over(void* memory, int64_t bytes, at::Device device) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                            c10::DataPtr(memory, device), nullptr, false));
}
}  // namespace

void follow(const c10::Stream& earlier, const c10::Stream& later) {
  if (earlier == later) return;
  c10::Event reached(earlier.device_type());
  reached.record(earlier);
  reached.block(later);
}

at::Tensor tensor_over(void* memory, at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(type));
  // Without the dispatcher, because the engine makes one per gradient.
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      storage_over(memory, bytes, device), c10::DispatchKeySet(c10::computeDispatchKey(type, at::kStrided, device)),
      c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

TorchDeviceMemory::Scope::Scope(const TorchDeviceMemory& memory)
    : stream_(memory.stream_),
      stream_before_(guard_of(memory.device_).getStream(memory.device_)),
      device_before_(guard_of(memory.device_).getDevice()) {
  follow(stream_before_, stream_);
  if (device_before_ != stream_.device()) guard_of(stream_.device()).setDevice(stream_.device());
  if (stream_before_ != stream_) guard_of(stream_.device()).exchangeStream(stream_);
}

TorchDeviceMemory::Scope::~Scope() {
  try {
    if (stream_before_ != stream_) {
      guard_of(stream_.device()).exchangeStream(stream_before_);
      follow(stream_, stream_before_);
    }
  } catch (const std::exception& failure) {  // of the device
    log(ZR_LOG_ERROR, first_line(failure.what()));
  }
  if (device_before_ != stream_.device()) guard_of(stream_.device()).uncheckedSetDevice(device_before_);
}

TorchDeviceMemory::TorchDeviceMemory(at::Device device)
    : device_(device), stream_(guard_of(device).getDefaultStream(device)), zero_(at::zeros({})) {}

TorchDeviceMemory::~TorchDeviceMemory() {
  const MutexLock lock(mutex_);
  for (const auto& [address, block] : memory_) add_engine_bytes(device_, -block.bytes);
}

zr_device TorchDeviceMemory::device() const {
  return {device_type_of(c10::DeviceTypeName(device_.type(), true)), device_.index()};
}

at::Tensor TorchDeviceMemory::over(const zr_view& view) const {
  return tensor_over(view.data, {view.count}, torch_type(view.dtype), device_);
}

void* TorchDeviceMemory::allocate(int64_t bytes) {
  const Scope scope(*this);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr int64_t kLeast = 64;
  bytes = std::max(bytes, kLeast);
  c10::DataPtr memory;
  try {
    memory = c10::GetAllocator(device_.type())->allocate(static_cast<std::size_t>(bytes));
  } catch (const c10::OutOfMemoryError& failure) {
    fail_environment("cannot allocate " + bytes_text(bytes) + " on " + device_.str() + ": " +
                     first_line(failure.what_without_backtrace()) +
                     "; use more ranks or a smaller model, or set offload.optimizer or offload.gradients to a tier");
  }
  void* const address = memory.mutable_get();
  tensor_over(address, {bytes}, at::kByte, device_).zero_();
  add_engine_bytes(device_, bytes);
  const MutexLock lock(mutex_);
  memory_.emplace(address, Block{std::move(memory), bytes});
  return address;
}

void TorchDeviceMemory::free(void* memory) noexcept {
  try {
    flush();
    const Scope scope(*this);                // the memory is not used again before the current stream has read it
  } catch (const std::exception& failure) {  // of the device
    log(ZR_LOG_ERROR, first_line(failure.what()));
  }
  Block freed;
  const MutexLock lock(mutex_);
  if (const auto at = memory_.find(memory); at != memory_.end()) {
    freed = std::move(at->second);
    memory_.erase(at);
    add_engine_bytes(device_, -freed.bytes);
  }
}

void TorchDeviceMemory::release_unused() {
  if (auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device_.type())))
    allocator->emptyCache();
}

void TorchDeviceMemory::zero(const zr_view& memory) {
  flush();
  const Scope scope(*this);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  tensor_over(memory.data, {memory.count * size_of(memory.dtype)}, at::kByte, device_).zero_();
}

void TorchDeviceMemory::copy(const zr_view& from, const zr_view& to) {
  flush();
  const Scope scope(*this);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (from.dtype != to.dtype) return void(over(to).copy_(over(from)));
  const int64_t bytes = from.count * size_of(from.dtype);  // of any dtype
  tensor_over(to.data, {bytes}, at::kByte, device_).copy_(tensor_over(from.data, {bytes}, at::kByte, device_));
}

void TorchDeviceMemory::add(const zr_view& from, const zr_view& to, bool first) {
  flush();
  const Scope scope(*this);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor sum = over(to);
  if (first)
    at::add_out(sum, over(from), zero_);
  else
    sum.add_(over(from));
}

void TorchDeviceMemory::keep_for_engine(const at::Tensor& tensor) const {
  const auto guard = guard_of(device_);
  if (guard.getStream(device_) != stream_) guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
}

void TorchDeviceMemory::copy_later(const at::Tensor& from, int64_t first, const zr_view& to) {
  const at::ScalarType type = torch_type(to.dtype);
  const bool can_wait = guard_of(device_).getStream(device_) == stream_ && from.scalar_type() == type;
  if (!can_wait || !from.is_contiguous()) {
    flush();
    const Scope scope(*this);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return void(over(to).copy_(from.reshape({-1}).narrow(0, first, to.count)));
  }
  const int64_t bytes = to.count * size_of(to.dtype);
  char* const values = static_cast<char*>(from.data_ptr()) + first * size_of(to.dtype);
  bool is_full = false;
  {
    const MutexLock lock(later_mutex_);
    later_.to.push_back(over(to));
    later_.from.push_back(tensor_over(values, {to.count}, type, device_));
    later_.kept.push_back(from);
    later_.bytes += bytes;
    is_full = later_.bytes > kMostLater;
  }
  if (is_full) flush();
}

void TorchDeviceMemory::flush() {
  LaterCopies copies;
  {
    const MutexLock lock(later_mutex_);
    if (later_.to.empty()) return;
    copies = std::exchange(later_, {});
  }
  const Scope scope(*this);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::_foreach_copy_(copies.to, copies.from, /*non_blocking=*/true);
}

void TorchDeviceMemory::call(const std::function<void()>& fn) {
  const Scope scope(*this);
  fn();
}

int64_t TorchDeviceMemory::count_non_finite(const zr_view& values) {
  flush();
  const Scope scope(*this);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor finite = at::isfinite(over(values)).sum();
  int64_t count = 0;
  wait([&] { count = finite.item<int64_t>(); });
  return values.count - count;
}

void TorchDeviceMemory::upload(const void* from, void* to, int64_t bytes) {
  flush();
  const Scope scope(*this);
  model::upload(from, storage_over(to, bytes, device_), bytes);
}

void TorchDeviceMemory::download(const void* from, void* to, int64_t bytes) {
  flush();
  const Scope scope(*this);
  wait([&] { model::download(storage_over(const_cast<void*>(from), bytes, device_), to, bytes); });
}

namespace {
struct TorchMark final : DeviceStream::Mark {
  explicit TorchMark(at::Device on) : device(on), event(on.type()) {}
  bool is_reached() override {
    try {
      guard_of(device).setDevice(device);  // of a thread for which it is not the current one yet
      return event.query();
    } catch (const c10::Error&) {
      return true;
    }
  }
  const at::Device device;
  c10::Event event;
};

std::unique_ptr<DeviceStream::Mark> mark_on(const c10::Stream& stream, std::unique_ptr<DeviceStream::Mark> unused) {
  std::unique_ptr<DeviceStream::Mark> mark = unused ? std::move(unused) : std::make_unique<TorchMark>(stream.device());
  static_cast<TorchMark&>(*mark).event.record(stream);
  return mark;
}

std::unique_ptr<DeviceStream> stream_like(zr_device numbers, at::Device device);

// A stream in addition to that of the engine.
class TorchStream final : public DeviceStream {
 public:
  TorchStream(zr_device numbers, c10::Stream stream) : numbers_(numbers), stream_(stream) {}
  zr_device device() const override { return numbers_; }
  void* native_stream() override { return stream_.native_handle(); }
  std::unique_ptr<Mark> mark(std::unique_ptr<Mark> unused) override { return mark_on(stream_, std::move(unused)); }
  void wait_for(Mark& mark) override { static_cast<TorchMark&>(mark).event.block(stream_); }
  std::unique_ptr<DeviceStream> new_stream() override { return stream_like(numbers_, stream_.device()); }

 private:
  const zr_device numbers_;
  const c10::Stream stream_;
};

std::unique_ptr<DeviceStream> stream_like(zr_device numbers, at::Device device) {
  return std::make_unique<TorchStream>(numbers, guard_of(device).getNewStream(device));
}
}  // namespace

std::unique_ptr<DeviceStream::Mark> TorchDeviceMemory::mark(std::unique_ptr<Mark> unused) {
  flush();
  return mark_on(stream_, std::move(unused));
}

void TorchDeviceMemory::wait_for(Mark& mark) {
  flush();
  static_cast<TorchMark&>(mark).event.block(stream_);
}

std::unique_ptr<DeviceStream> TorchDeviceMemory::new_stream() { return stream_like(device(), device_); }

std::unique_ptr<PinnedMemory> TorchDeviceMemory::allocate_pinned(int64_t bytes) {
  return model::allocate_pinned(bytes);
}

std::unique_ptr<CopyStream> TorchDeviceMemory::new_copy_stream() {
  return std::make_unique<TorchCopyStream>(*this, stream_);
}

void TorchDeviceMemory::run(const std::function<void(zr_stream*)>& work) {
  flush();
  const Scope scope(*this);
  work(abi());
}

void* TorchDeviceMemory::native_stream() { return stream_.native_handle(); }

}  // namespace zr::host::model
