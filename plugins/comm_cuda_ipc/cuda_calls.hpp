// Calls of the CUDA runtime with errors as exceptions, for communicators.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "zr/base.hpp"

namespace peer {

[[noreturn]] inline void fail(cudaError_t error, const std::string& call) {
  cudaGetLastError();  // forgets it: the next launch reads it
  if (error == cudaErrorNoKernelImageForDevice)
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "this library has no code for the compute capability of this GPU: build it with "
                          "ZR_CUDA_ARCHITECTURES, or choose communicator = \"shm\" with offload.gradients = \"cpu\" to "
                          "exchange in host memory",
                          error);
  throw zr::PluginError(error == cudaErrorMemoryAllocation ? ZR_NOMEM : ZR_IO,
                        "CUDA: " + call + ": " + cudaGetErrorString(error), error);
}
inline void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) fail(error, call);
}

/// While it lives, the device is the current one of the thread. The next call reports a failure.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) noexcept {
    changed_ = cudaGetDevice(&before_) == cudaSuccess && before_ != device;
    if (changed_) cudaSetDevice(device);
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace peer
