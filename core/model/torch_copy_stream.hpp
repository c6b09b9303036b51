// CopyStream and PinnedMemory through libtorch's generic device API.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>

#include "base/copy_stream.hpp"

namespace zr::host::model {

class TorchDeviceMemory;

/// Memory of libtorch's allocator for pinned memory.
std::unique_ptr<PinnedMemory> allocate_pinned(int64_t bytes);

/// PinnedMemory must be from allocate_pinned().
class TorchCopyStream final : public CopyStream {
 public:
  /// computation: the stream of `memory`, which outlives the object.
  TorchCopyStream(TorchDeviceMemory& memory, c10::Stream computation);
  ~TorchCopyStream() override;
  void follow_computation() override;
  void lead_computation() override;
  void to_host(const void* from, const PinnedMemory& to, int64_t offset, int64_t bytes) override;
  void to_device(const PinnedMemory& from, int64_t offset, void* to, int64_t bytes) override;
  std::unique_ptr<Mark> mark() override;

 private:
  void copy(const at::Tensor& from, const at::Tensor& to) const;

  TorchDeviceMemory& memory_;
  const c10::Stream computation_, stream_;
};

}  // namespace zr::host::model
