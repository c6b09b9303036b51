// Gradients on their way from a device to host memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <optional>

#include "base/thread_without_signals.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

/// Copies gradients to pinned memory on a stream of its own, and delivers each when its copy is complete, in the order
/// in which autograd accumulated them.
class GradientDownloads {
 public:
  using Deliver = std::function<void(uint32_t param, const at::Tensor& on_host)>;
  /// `deliver`: called on one thread at a time. bytes_of_backward: of all gradients of a backward.
  GradientDownloads(at::Device device, int64_t bytes_of_backward, Deliver deliver);
  ~GradientDownloads();
  GradientDownloads(const GradientDownloads&) = delete;
  /// Where gradients are delivered: on a thread of this object, as soon as their copies are complete; or inside add()
  /// and finish(). Then which ones have been delivered depends on the order and the sizes of the gradients alone, so
  /// that ranks whose operators communicate too issue all collectives in the same order. Between backwards.
  void deliver_on_thread(bool on);
  /// Begins the copy of a dense gradient that the current stream of this thread computes. Waits if too many bytes are
  /// in flight. Throws what `deliver` has thrown. One call at a time, autograd's threads.
  void add(uint32_t param, const at::Tensor& gradient);
  /// Returns when all gradients have been delivered. Throws what `deliver` has thrown. Training thread.
  void finish();
  /// Drops the gradients that have not been delivered; logs errors of the device. Training thread.
  void drop();

 private:
  struct Copy {
    uint32_t param;
    at::Tensor on_host;
    c10::Event complete;
  };
  void run();
  bool is_full() const ZR_REQUIRES(mutex_) { return bytes_ > limit_ && copies_.size() > kCount; }
  Copy pop_oldest() ZR_REQUIRES(mutex_);
  void stop_thread();
  void throw_failure();

  static constexpr std::size_t kCount = 4;
  const at::Device device_;
  const c10::Stream stream_;
  const int64_t limit_;  // of bytes_, if there are more than kCount copies
  const Deliver deliver_;
  Mutex mutex_;
  ConditionVariable changed_;
  std::deque<Copy> copies_ ZR_GUARDED_BY(mutex_);
  int64_t bytes_ ZR_GUARDED_BY(mutex_) = 0;  // of copies_
  bool delivering_ ZR_GUARDED_BY(mutex_) = false, stopping_ ZR_GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ ZR_GUARDED_BY(mutex_);
  std::optional<std::thread> thread_;
};

}  // namespace zr::host::model
