// One device as this rank uses it: cuda_device.cu for CUDA, tests/simulators/sim_nccl for the simulated device of the
// tests.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "zr/base.hpp"
#include "zr/ordered_reduce.hpp"

namespace nccl {

/// A point of a stream, as an event. Errors are zr::PluginErrors. One thread at a time.
class Mark {
 public:
  virtual ~Mark() = default;
  /// This point of the stream, in place of the one recorded before.
  virtual void record(void* stream) = 0;
  /// True if the stream has reached the point, or none is recorded. Does not wait.
  virtual bool is_reached() = 0;
  /// `stream` continues after the point, if one is recorded.
  virtual void wait(void* stream) = 0;
};

/// Streams are native handles. Calls with a stream enqueue work there and do not wait. Errors are zr::PluginErrors. One
/// thread at a time, except make_current().
class GpuDevice {
 public:
  virtual ~GpuDevice() = default;
  /// Names the device within its node, equally in all processes.
  virtual std::string id() const = 0;
  /// Calls `call` while the device is the current one of the thread. [any]
  virtual void make_current(const std::function<void()>& call) = 0;
  /// Makes the device the current one of the thread, for as long as it runs. [any]
  virtual void use_on_this_thread() noexcept = 0;

  /// Memory of the device, aligned to 256 bytes.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void free(void* memory) noexcept = 0;
  /// Host memory that copy() accepts.
  virtual void* allocate_host(int64_t bytes) = 0;
  virtual void free_host(void* memory) noexcept = 0;
  virtual void* create_stream() = 0;
  virtual void destroy_stream(void* stream) noexcept = 0;
  virtual std::unique_ptr<Mark> make_mark() = 0;

  /// Between memory of the device and memory of allocate_host(), in any direction.
  virtual void copy(void* to, const void* from, int64_t bytes, void* stream) = 0;
  /// See zr::ordered_reduce().
  virtual void reduce(const zr::ReduceKind& kind, const void* const* sources, int n, void* out, int64_t count,
                      void* stream) = 0;
  /// Calls fn(context) on any thread when the stream gets there. fn must not use the device.
  virtual void call(void (*fn)(void* context), void* context, void* stream) = 0;
};

/// Most ranks: a kernel gets the addresses of all sources as parameters.
inline constexpr int kMaxRanks = 479;

/// True if this process can use a device.
bool has_device() noexcept;
/// The number of the device through which a communicator for host memory moves data. Throws if no device can be used.
int32_t current_device(const zr::Host& host);
/// Opens the device with this number.
std::unique_ptr<GpuDevice> open_device(int32_t number);

}  // namespace nccl
