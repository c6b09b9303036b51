// Memory of the device that a model computes on, and what the engine does with it, without the device's library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "base/copy_stream.hpp"
#include "base/device_stream.hpp"
#include "base/draft_abi.hpp"
#include "base/dtype.hpp"
#include "zr/abi/base.h"

namespace zr::host {

/// All operations run on one stream of the device, in the order of the calls. A call returns when its operations are
/// enqueued, unless its comment says that it waits. They begin after everything that the current stream of the calling
/// thread contains, which continues after them. Any thread; the caller serialises.
class DeviceMemory : public DeviceStream {
 public:
  /// Zeroed memory, aligned to at least 64 bytes. Throws EnvironmentError if the device has not enough.
  virtual void* allocate(int64_t bytes) = 0;
  /// Its memory may be used again for operations after those that were enqueued before. No operation on another stream
  /// may still use it.
  virtual void free(void* memory) noexcept = 0;
  /// Returns memory that the device's library keeps for later allocations to the device.
  virtual void release_unused() {}

  /// The views of these functions are on the device.
  virtual void zero(const zr_view& memory) = 0;
  /// Copies, and rounds to the dtype of `to`.
  virtual void copy(const zr_view& from, const zr_view& to) = 0;
  /// to = 0 + from if `first`, else to + from: in fp32 for floats of up to 32 bits, rounded once.
  virtual void add(const zr_view& from, const zr_view& to, bool first) = 0;
  /// Waits. The number of elements that are not finite.
  virtual int64_t count_non_finite(const zr_view& values) = 0;

  /// Copies from host memory, which may be used again when the call returns.
  virtual void upload(const void* from, void* to, int64_t bytes) = 0;
  /// Copies to host memory. Waits.
  virtual void download(const void* from, void* to, int64_t bytes) = 0;

  /// Memory for copies of new_copy_stream(). Throws EnvironmentError if there is not enough.
  virtual std::unique_ptr<PinnedMemory> allocate_pinned(int64_t bytes) = 0;
  virtual std::unique_ptr<CopyStream> new_copy_stream() = 0;

  /// Enqueues operations that were put off so that several are enqueued together. All functions do that first, except
  /// call(). Any thread.
  virtual void flush() {}
  /// Calls fn while the stream is the current one of this thread. fn enqueues operations through this object alone.
  virtual void call(const std::function<void()>& fn) = 0;
  /// Calls work(stream), which may enqueue operations on the stream.
  virtual void run(const std::function<void(zr_stream* stream)>& work) = 0;

  /// Replaces each wait of the functions that wait, such as download(), by around(wait), which must call wait(). Empty:
  /// ends that. Not during other calls.
  void watch_waits(std::function<void(const std::function<void()>& wait)> around) { around_waits_ = std::move(around); }

  /// Calls fn, which waits for the device, in that way.
  void wait(const std::function<void()>& fn) const { around_waits_ ? around_waits_(fn) : fn(); }

 private:
  std::function<void(const std::function<void()>& wait)> around_waits_;
};

/// DLPack's number of a type of device other than the CPU, as in zr_device: `name` is libtorch's name of the type
/// ("cuda"), or of one device ("cuda:1"). Types without a number of their own have ZR_DEVICE_EXTENSION.
inline int32_t device_type_of(std::string_view name) {
  constexpr int32_t kMetal = 8, kOneApi = 14;
  constexpr std::pair<std::string_view, int32_t> kTypes[] = {
      {"cuda", ZR_DEVICE_CUDA}, {"mps", kMetal}, {"xpu", kOneApi}};
  for (const auto& [type, number] : kTypes)
    if (type == name.substr(0, name.find(':'))) return number;
  return ZR_DEVICE_EXTENSION;
}

/// The device of host memory.
inline constexpr zr_device kHostMemory{ZR_DEVICE_CPU, 0};

/// How host memory with a copy of device memory is used.
struct HostCopy {
  bool reads, writes;
};
/// Calls fn(memory, first, count) for consecutive parts of a view on the device: `memory` is host memory with a copy of
/// elements [first, first + count). If `use` does not read, its content is undefined; if it writes, it is copied back.
template <class Fn>
void visit_on_host(DeviceMemory& device, const zr_view& view, HostCopy use, const Fn& fn) {
  constexpr int64_t kPart = int64_t{4} << 20;  // elements
  const int64_t size = size_of(view.dtype);
  std::vector<char> copy(static_cast<std::size_t>(std::min(kPart, view.count) * size));
  for (int64_t first = 0; first < view.count; first += kPart) {
    const zr_view part = part_of(view, first, std::min(kPart, view.count - first));
    if (use.reads) device.download(part.data, copy.data(), part.count * size);
    fn(static_cast<void*>(copy.data()), first, part.count);
    if (use.writes) device.upload(copy.data(), part.data, part.count * size);
  }
}

}  // namespace zr::host
