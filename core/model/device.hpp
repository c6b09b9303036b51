// The device that a model computes on, through libtorch's generic device API: no vendor's library is named here.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/model.hpp"

namespace zr::host::model {

/// Opens the device that job.device names and makes it the current device of this thread: the CPU; a type that libtorch
/// knows ("cuda"), whose device number is then local_rank modulo the number of devices; or a type with a number
/// ("cuda:1"). load_device_library() must have loaded its backend. Throws UserError or EnvironmentError with the
/// remedy. Training thread.
at::Device open_device(const std::string& name, int local_rank);
/// The number of devices of that type; 0 for the CPU. Any thread.
int device_count(at::DeviceType type);
/// Waits until the device has done what is enqueued on its default stream and on the current one of this thread.
void synchronize_streams(at::Device device);

/// The memory of a device that libtorch holds for this process. Not counted for the CPU, and if the backend's allocator
/// is not a c10::DeviceAllocator. Any thread.
DeviceBytes device_bytes(at::Device device);
/// Adds bytes that an engine allocated on a device through libtorch (negative: freed) to DeviceBytes::of_engines. Any
/// thread.
void add_engine_bytes(at::Device device, int64_t bytes);
/// Sets the peak to the bytes held now. Any thread.
void reset_peak(at::Device device);

/// The CPU, and the opened devices in the order in which they were opened. Any thread.
std::vector<at::Device> devices_in_use();
/// The random state of these devices. Training thread, and autograd's threads.
class RandomState {
 public:
  static RandomState current(const std::vector<at::Device>& devices = devices_in_use());
  void restore() const;

 private:
  std::vector<std::pair<at::Device, at::Tensor>> states_;
};
/// Seeds the random generators of the CPU and of every opened device.
void seed_generators(uint64_t seed);

}  // namespace zr::host::model
