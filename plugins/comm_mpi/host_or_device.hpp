// What the library for a device opens: a communicator for either kind of memory.
#pragma once

#include <cstdint>
#include <memory>

#include "device_communicator.hpp"
#include "mpi_communicator.hpp"

namespace mpi {

/// One open communicator, for host memory or for memory of a device. Threads as in zr_communicator_api.
class HostOrDevice {
 public:
  static constexpr uint64_t most_open = 2;  // that a job opens: one for each kind of memory

  /// Throws PluginError. `thread`: null if there is one rank.
  HostOrDevice(const zr::Host& host, const zr_comm_open& open, MpiThread* thread, const MpiOptions& options);

  void submit(const zr_coll& coll, zr_stream* stream, zr_done* done);
  void progress();
  zr_view mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags);
  void mem_free(const zr_view& memory) noexcept;
  /// Host memory only.
  void shared_alloc(uint64_t bytes, void** writer, const void** reader);
  void shared_free(void* writer) noexcept;
  void abort() noexcept;

 private:
  std::unique_ptr<MpiCommunicator> host_;
  std::unique_ptr<DeviceCommunicator> device_;  // one of the two is null
};

}  // namespace mpi
