// The CUDA device to which calls of a thread go, for communicators and optimizers.
#pragma once

#include <cuda_runtime.h>

namespace cuda_calls {

/// While it lives, the device is the current one of the thread. After a failure it is not: the next call reports the
/// failure, but a launch would go to another device, so check error() before one.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) noexcept {
    error_ = cudaGetDevice(&before_);
    if (error_ != cudaSuccess || before_ == device) return;
    error_ = cudaSetDevice(device);
    changed_ = error_ == cudaSuccess;
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace cuda_calls
