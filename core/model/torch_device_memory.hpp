// DeviceMemory through libtorch's generic device API.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "base/device_memory.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

/// A tensor of these sizes over memory of the device that it does not own.
at::Tensor tensor_over(void* memory, at::IntArrayRef sizes, at::ScalarType type, at::Device device);

/// What is enqueued on `later` from now on begins after everything that `earlier` contains.
void follow(const c10::Stream& earlier, const c10::Stream& later);

/// The stream is the default stream of the device.
class TorchDeviceMemory final : public DeviceMemory {
 public:
  explicit TorchDeviceMemory(at::Device device);
  ~TorchDeviceMemory() override;
  zr_device device() const override;
  void* allocate(int64_t bytes) override;
  void free(void* memory) noexcept override;
  void release_unused() override;
  void zero(const zr_view& memory) override;
  void copy(const zr_view& from, const zr_view& to) override;
  void add(const zr_view& from, const zr_view& to, bool first) override;
  int64_t count_non_finite(const zr_view& values) override;
  void upload(const void* from, void* to, int64_t bytes) override;
  void download(const void* from, void* to, int64_t bytes) override;
  std::unique_ptr<Mark> mark(std::unique_ptr<Mark> unused) override;
  void wait_for(Mark& mark) override;
  std::unique_ptr<DeviceStream> new_stream() override;
  std::unique_ptr<PinnedMemory> allocate_pinned(int64_t bytes) override;
  std::unique_ptr<CopyStream> new_copy_stream() override;
  void flush() override;
  void call(const std::function<void()>& fn) override;
  void run(const std::function<void(zr_stream* stream)>& work) override;
  void* native_stream() override;

  /// Memory of a tensor that another stream has computed is not used again before the engine's stream has read it.
  void keep_for_engine(const at::Tensor& tensor) const;
  /// Copies elements [first, first + to.count) of a tensor on the device. Copies that follow each other are enqueued
  /// together, by flush() or when they have more than kMostLater bytes; the tensor must not change until then.
  void copy_later(const at::Tensor& from, int64_t first, const zr_view& to);

  /// During its lifetime, the stream of the engine is the current stream of this thread. It waits for the stream that
  /// was current, which then waits for it.
  class Scope;

 private:
  struct Block {
    c10::DataPtr memory;
    int64_t bytes = 0;
  };
  at::Tensor over(const zr_view& view) const;

  static constexpr int64_t kMostLater = int64_t{64} << 20;
  struct LaterCopies {
    std::vector<at::Tensor> to, from, kept;  // `from` does not own its memory, `kept` does
    int64_t bytes = 0;
  };
  const at::Device device_;
  const c10::Stream stream_;
  const at::Tensor zero_;  // on the CPU
  Mutex later_mutex_;
  LaterCopies later_ ZR_GUARDED_BY(later_mutex_);
  Mutex mutex_;
  std::unordered_map<void*, Block> memory_ ZR_GUARDED_BY(mutex_);
};

class TorchDeviceMemory::Scope {
 public:
  /// Makes it the current one. `memory` must live until it has returned.
  explicit Scope(const TorchDeviceMemory& memory);
  ~Scope();
  Scope(const Scope&) = delete;

 private:
  const c10::Stream stream_, stream_before_;
  const c10::Device device_before_;
};

}  // namespace zr::host::model
