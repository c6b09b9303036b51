// The CUDA device to which calls of a thread go, and launches of kernels, for communicators and optimizers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

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

/// Enqueues a kernel on the stream, whose device is the current one. Without <<<>>>, which other compilers do not know:
/// tests run the kernels on the CPU (tests/simulators/cuda_on_cpu).
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), uint32_t blocks, uint32_t threads_of_block, cudaStream_t stream,
                   const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim.x = blocks;
  config.blockDim.x = threads_of_block;
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) cudaGetLastError();  // forgets it: another call would report it again
  return error;
}

}  // namespace cuda_calls
