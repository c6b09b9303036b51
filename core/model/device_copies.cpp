#include "model/device_copies.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <optional>

#include "base/round_up.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

namespace {
at::TensorOptions bytes_on(at::Device device) { return at::TensorOptions().dtype(at::kByte).device(device); }

at::Tensor bytes_of(const c10::Storage& storage, int64_t bytes) {
  at::Tensor tensor = at::empty({0}, bytes_on(storage.device()));
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_contiguous({bytes});
  return tensor;
}

void copy_bytes(void* to, const void* from, int64_t bytes) {
  constexpr int64_t kGrain = int64_t{1} << 20;  // bytes that are worth a thread
  at::parallel_for(0, bytes, kGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                static_cast<std::size_t>(end - begin));
  });
}

// Pinned memory for uploads to one device: slots that are filled in turn. A slot is used again when the copies from it
// are complete.
class UploadRing {
 public:
  explicit UploadRing(at::Device device) : device_(device) {}

  void upload(const void* from, const at::Tensor& to, int64_t bytes) {
    const MutexLock lock(mutex_);
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    for (int64_t at = 0; at < bytes;) {
      if (slots_[slot_].used == kBytes || (slots_[slot_].used > 0 && slots_[slot_].stream != stream)) next_slot();
      Slot& slot = slots_[slot_];
      if (slot.used == 0) prepare(slot, stream);
      const int64_t n = std::min(kBytes - slot.used, bytes - at);
      copy_bytes(static_cast<char*>(slot.memory.mutable_data_ptr()) + slot.used, static_cast<const char*>(from) + at,
                 n);
      to.narrow(0, at, n).copy_(slot.memory.narrow(0, slot.used, n), true);
      at += n;
      slot.used = std::min(kBytes, round_up(slot.used + n, kAlign));
    }
  }

 private:
  static constexpr int64_t kBytes = int64_t{8} << 20, kAlign = 256;
  struct Slot {
    at::Tensor memory;
    int64_t used = 0;
    std::optional<c10::Stream> stream;   // of the copies from it
    std::optional<c10::Event> complete;  // the last copy, once the slot is full
  };
  void prepare(Slot& slot, const c10::Stream& stream) ZR_REQUIRES(mutex_) {
    if (!slot.memory.defined()) slot.memory = at::empty({kBytes}, bytes_on(at::kCPU).pinned_memory(true));
    if (slot.complete) slot.complete->synchronize();
    slot.stream = stream;
  }
  void next_slot() ZR_REQUIRES(mutex_) {
    Slot& slot = slots_[slot_];
    slot.complete.emplace(device_.type());
    slot.complete->record(*slot.stream);
    slot_ = (slot_ + 1) % slots_.size();
    slots_[slot_].used = 0;
  }

  const at::Device device_;
  Mutex mutex_;
  std::array<Slot, 4> slots_ ZR_GUARDED_BY(mutex_);
  std::size_t slot_ ZR_GUARDED_BY(mutex_) = 0;
};

UploadRing& ring_of(at::Device device) {
  static auto* mutex = new Mutex;  // uploads may run while static objects are destroyed
  static auto* rings = new std::map<std::string, std::unique_ptr<UploadRing>>;
  const MutexLock lock(*mutex);
  auto& ring = (*rings)[device.str()];
  if (!ring) ring = std::make_unique<UploadRing>(device);
  return *ring;
}
}  // namespace

void upload(const void* from, const c10::Storage& to, int64_t bytes) {
  if (bytes == 0) return;
  const at::NoGradGuard no_grad;
  ring_of(to.device()).upload(from, bytes_of(to, bytes), bytes);
}

void download(const c10::Storage& from, void* to, int64_t bytes) {
  if (bytes == 0) return;
  const at::NoGradGuard no_grad;
  at::from_blob(to, {bytes}, bytes_on(at::kCPU)).copy_(bytes_of(from, bytes));
}

GradientDownloads::GradientDownloads(at::Device device)
    : device_(device), stream_(c10::impl::VirtualGuardImpl(device.type()).getNewStream(device)) {}

GradientDownloads::~GradientDownloads() { drop(); }

void GradientDownloads::add(uint32_t param, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  const at::Tensor values = gradient.contiguous();
  c10::Event computed(device_.type());
  computed.record(guard.getStream(device_));
  computed.block(stream_);
  const c10::StreamGuard scope(stream_);
  at::Tensor on_host = at::empty(values.sizes(), at::TensorOptions().dtype(values.scalar_type()).pinned_memory(true));
  on_host.copy_(values, true);
  guard.recordDataPtrOnStream(values.storage().data_ptr(), stream_);  // its memory is not reused before the copy
  c10::Event complete(device_.type());
  complete.record(stream_);
  copies_.push_back({param, std::move(on_host), std::move(complete)});
}

void GradientDownloads::deliver_first(const Deliver& deliver) {
  const uint32_t param = copies_.front().param;
  const at::Tensor gradient = std::move(copies_.front().on_host);
  copies_.pop_front();
  deliver(param, gradient);
}

void GradientDownloads::deliver_complete(const Deliver& deliver) {
  while (!copies_.empty() && copies_.front().complete.query()) deliver_first(deliver);
}

void GradientDownloads::deliver_all(const Deliver& deliver) {
  while (!copies_.empty()) {
    copies_.front().complete.synchronize();
    deliver_first(deliver);
  }
}

void GradientDownloads::drop() {
  for (Copy& copy : copies_) copy.complete.synchronize();
  copies_.clear();
}

}  // namespace zr::host::model
