// One open communicator for memory of a device: MPI moves copies in host memory.
//
// The stream of a call copies the sources to host memory, waits there until MPI has completed the operation, and copies
// the results to the device. The MPI thread asks the device when the sources have arrived, so a call waits for nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../comm_nccl/gpu_device.hpp"
#include "mpi_communicator.hpp"
#include "zr/collective_parts.hpp"
#include "zr/communicator.hpp"
#include "zr/device_stream.hpp"

namespace mpi {

/// Threads as in zr_communicator_api.
class DeviceCommunicator {
 public:
  /// Throws PluginError. `thread`: null if there is one rank.
  DeviceCommunicator(const zr::Host& host, const zr_comm_open& open, MpiThread* thread, const MpiOptions& options);
  ~DeviceCommunicator();
  DeviceCommunicator(const DeviceCommunicator&) = delete;

  void submit(const zr_coll& coll, zr_stream* stream, zr_done* done);
  void progress();
  /// Memory of the device.
  zr_view mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags);
  void mem_free(const zr_view& memory) noexcept;
  void abort() noexcept;

 private:
  class Passage;
  struct Resolution;

  void copy_own_part(const zr::CollectiveParts& operation, void* stream);
  std::shared_ptr<Passage> passage_of(int64_t bytes);
  bool all_of_passages(bool (*holds)(Passage&)) const;
  void resolve_on_stream(zr_done* done, std::shared_ptr<Passage> passage, void* stream);
  void wait_until_zero(void* memory, uint64_t bytes);
  void close_orderly() noexcept;

  const zr::Host host_;
  const zr_device device_id_;
  const std::unique_ptr<nccl::GpuDevice> device_;
  std::unique_ptr<MpiCommunicator> host_memory_;    // moves the copies; null while this is destroyed
  std::vector<std::shared_ptr<Passage>> passages_;  // of the operations in progress, and of earlier ones
  std::optional<void*> only_stream_;                // of all operations
};

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
