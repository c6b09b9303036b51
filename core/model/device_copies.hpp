// Copies between host memory and the memory of a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <functional>

namespace zr::host::model {

/// Enqueues a copy from host memory to the storage on the current stream of this thread. On return, the host memory may
/// be reused: its bytes are in pinned memory. Any thread.
void upload(const void* from, const c10::Storage& to, int64_t bytes);
/// Copies the storage to host memory after everything that is enqueued on the current stream of this thread, and waits
/// for it. Any thread.
void download(const c10::Storage& from, void* to, int64_t bytes);

/// Gradients on their way from a device to pinned host memory, in the order in which autograd accumulated them. The
/// copies run on a stream of their own; autograd's threads do not wait for them. One call at a time, any thread.
class GradientDownloads {
 public:
  using Deliver = std::function<void(uint32_t param, const at::Tensor& gradient)>;
  explicit GradientDownloads(at::Device device);
  ~GradientDownloads();
  /// Begins the copy of a dense gradient that the current stream of this thread computes.
  void add(uint32_t param, const at::Tensor& gradient);
  /// Removes the oldest gradients whose copies are complete, up to the first that is not, and passes each to `deliver`.
  void deliver_complete(const Deliver& deliver);
  /// Waits for all copies, and delivers them in order.
  void deliver_all(const Deliver& deliver);
  /// Waits for all copies, and drops them.
  void drop();

 private:
  struct Copy {
    uint32_t param;
    at::Tensor on_host;
    c10::Event complete;
  };
  void deliver_first(const Deliver& deliver);
  const at::Device device_;
  const c10::Stream stream_;
  std::deque<Copy> copies_;
};

}  // namespace zr::host::model
