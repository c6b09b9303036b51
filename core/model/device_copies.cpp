#include "model/device_copies.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/round_up.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

namespace {
at::TensorOptions bytes_on(at::Device device) { return at::TensorOptions().dtype(at::kByte).device(device); }

at::Tensor bytes_of(const c10::Storage& storage, int64_t bytes, int64_t offset) {
  at::Tensor tensor = at::empty({0}, bytes_on(storage.device()));
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  impl->set_sizes_contiguous({bytes});
  return tensor;
}

void in_parallel(const ParallelFor& parallel_for, int64_t bytes, const std::function<void(int64_t, int64_t)>& copy) {
  constexpr int64_t kGrain = int64_t{512} << 10;  // bytes that are worth a thread
  parallel_for ? parallel_for(bytes, kGrain, copy) : copy(0, bytes);
}

// A part of an upload that is in one slot.
struct SlotRange {
  const char* from;
  at::Tensor to;
  int64_t offset, bytes;  // in the slot
};

// Pinned memory for uploads to one device: slots that are filled in turn. A slot is used again when the copies from it
// are complete.
class UploadRing {
 public:
  explicit UploadRing(at::Device device) : device_(device) {}

  void upload(const std::vector<Upload>& uploads, const ParallelFor& parallel_for) {
    const MutexLock lock(mutex_);
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    std::vector<SlotRange> parts;
    for (const Upload& upload : uploads) {
      const at::Tensor to = bytes_of(upload.to, upload.bytes, upload.offset);
      for (int64_t at = 0; at < upload.bytes;) {
        if (slots_[slot_].used == kBytes || (slots_[slot_].used > 0 && slots_[slot_].stream != stream)) {
          flush(parts, parallel_for);
          next_slot();
        }
        Slot& slot = slots_[slot_];
        if (slot.used == 0) prepare(slot, stream);
        const int64_t n = std::min(kBytes - slot.used, upload.bytes - at);
        parts.push_back({static_cast<const char*>(upload.from) + at, to.narrow(0, at, n), slot.used, n});
        at += n;
        slot.used = std::min(kBytes, round_up(slot.used + n, kAlign));
      }
    }
    flush(parts, parallel_for);
  }

 private:
  static constexpr int64_t kBytes = int64_t{16} << 20, kAlign = 256;
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
  // Copies the parts to the current slot, and enqueues their copies to the device.
  void flush(std::vector<SlotRange>& parts, const ParallelFor& parallel_for) ZR_REQUIRES(mutex_) {
    if (parts.empty()) return;
    const at::Tensor& memory = slots_[slot_].memory;
    char* const to = static_cast<char*>(memory.mutable_data_ptr());
    const int64_t first = parts.front().offset, end = parts.back().offset + parts.back().bytes;
    in_parallel(parallel_for, end - first, [&](int64_t from, int64_t until) {
      for (const SlotRange& part : parts) {
        const int64_t begin = std::max(first + from, part.offset),
                      stop = std::min(first + until, part.offset + part.bytes);
        if (begin < stop)
          std::memcpy(to + begin, part.from + (begin - part.offset), static_cast<std::size_t>(stop - begin));
      }
    });
    for (const SlotRange& part : parts) part.to.copy_(memory.narrow(0, part.offset, part.bytes), true);
    parts.clear();
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

void copy_bytes(void* to, const void* from, int64_t bytes, const ParallelFor& parallel_for) {
  in_parallel(parallel_for, bytes, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                static_cast<std::size_t>(end - begin));
  });
}

void upload(const std::vector<Upload>& uploads, const ParallelFor& parallel_for) {
  if (uploads.empty()) return;
  const at::NoGradGuard no_grad;
  ring_of(uploads.front().to.device()).upload(uploads, parallel_for);
}

void upload(const void* from, const c10::Storage& to, int64_t bytes, const ParallelFor& parallel_for) {
  if (bytes > 0) upload(std::vector<Upload>{{from, to, bytes, 0}}, parallel_for);
}

void download(const c10::Storage& from, void* to, int64_t bytes, int64_t offset) {
  if (bytes == 0) return;
  const at::NoGradGuard no_grad;
  at::from_blob(to, {bytes}, bytes_on(at::kCPU)).copy_(bytes_of(from, bytes, offset));
}

std::function<double()> value_on_host(const at::Tensor& scalar, const DeviceMemory& memory) {
  const at::NoGradGuard no_grad;
  const c10::impl::VirtualGuardImpl guard(scalar.device().type());
  const at::Tensor value = at::empty({}, at::TensorOptions(scalar.scalar_type()).pinned_memory(true));
  value.copy_(scalar.reshape({}), /*non_blocking=*/true);
  const auto complete = std::make_shared<c10::Event>(scalar.device().type());
  complete->record(guard.getStream(scalar.device()));
  return [value, complete, &memory] {
    if (!complete->query()) memory.wait([&] { complete->synchronize(); });
    return value.item<double>();
  };
}

}  // namespace zr::host::model
