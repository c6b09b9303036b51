// Calls of the CUDA runtime with errors as exceptions, for communicators.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "current_device.hpp"
#include "zr/base.hpp"

namespace peer {

[[noreturn]] inline void fail(cudaError_t error, const std::string& call) {
  cudaGetLastError();  // forgets it: libtorch's next launch reads it
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

using cuda_calls::CurrentDevice;

}  // namespace peer
