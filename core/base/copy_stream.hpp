// Copies between memory of a device and host memory that run while the device computes.
#pragma once

#include <cstdint>
#include <memory>

namespace zr::host {

/// Host memory that a device reads and writes without the CPU.
class PinnedMemory {
 public:
  virtual ~PinnedMemory() = default;
  virtual char* data() const = 0;
};

/// A stream of its own: copies run in the order in which they are enqueued, at the same time as the computation, which
/// is what is enqueued on the stream of the DeviceMemory that made the object. The caller serialises; offsets and sizes
/// are in bytes.
class CopyStream {
 public:
  /// Waits until all copies are complete.
  virtual ~CopyStream() = default;

  /// Copies that are enqueued later begin after the computation that is enqueued now.
  virtual void follow_computation() = 0;
  /// Computation that is enqueued later begins after the copies that are enqueued now.
  virtual void lead_computation() = 0;
  /// Enqueues a copy. Both ranges of memory must live and stay unchanged until it is complete.
  virtual void to_host(const void* from, const PinnedMemory& to, int64_t offset, int64_t bytes) = 0;
  virtual void to_device(const PinnedMemory& from, int64_t offset, void* to, int64_t bytes) = 0;

  /// A point of the stream.
  class Mark {
   public:
    virtual ~Mark() = default;
    virtual void wait() = 0;  // until the copies before it are complete
  };
  /// The current end of the stream.
  virtual std::unique_ptr<Mark> mark() = 0;
};

}  // namespace zr::host
