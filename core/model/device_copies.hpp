// Copies between host memory and the memory of a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "base/device_memory.hpp"
#include "model/model.hpp"

namespace zr::host::model {

using ParallelFor = Model::ParallelFor;
/// memcpy() by several threads.
void copy_bytes(void* to, const void* from, int64_t bytes, const ParallelFor& parallel_for);
/// Enqueues a copy from host memory to the storage on the current stream of this thread. On return, the host memory may
/// be reused: its bytes are in pinned memory. Any thread.
void upload(const void* from, const c10::Storage& to, int64_t bytes, const ParallelFor& parallel_for = {});
/// One of several uploads.
struct Upload {
  const void* from;
  c10::Storage to;
  int64_t bytes;
  int64_t offset = 0;  // bytes in the storage
};
/// Uploads to one device; faster than one after the other. Any thread.
void upload(const std::vector<Upload>& uploads, const ParallelFor& parallel_for);
/// Copies the storage to host memory after everything that is enqueued on the current stream of this thread, and waits
/// for it. Any thread.
void download(const c10::Storage& from, void* to, int64_t bytes, int64_t offset = 0);

/// Enqueues a copy of the one element of a tensor, which the current stream of this thread computes. The result returns
/// it; it waits for the copy, by `memory`, unless it is complete.
std::function<double()> value_on_host(const at::Tensor& scalar, const DeviceMemory& memory);

}  // namespace zr::host::model
