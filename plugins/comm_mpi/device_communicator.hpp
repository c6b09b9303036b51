// One open communicator for memory of a device: MPI moves copies in host memory.
//
// The stream of a call copies the source to host memory, calls a function of the host that waits until MPI has
// completed the operation, and copies the result to the device. So a call does not wait for the device.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
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
  class Block;
  struct Completion;
  struct Failure {
    zr_code code;
    std::string text;
  };

  void check_arguments(const zr::CollectiveParts& operation, bool has_stream, void* stream) const;
  void run(const zr::CollectiveParts& operation, zr_done* done, void* stream);
  void run_alone(const zr::CollectiveParts& operation, void* stream);
  void wait_in_stream(const std::shared_ptr<Passage>& passage, void* stream);
  void resolve_in_stream(zr_done* done, const std::shared_ptr<Passage>& passage, void* stream);
  Block& block_of(int64_t bytes);
  void wait_until_zero(void* memory, uint64_t bytes);
  void close_orderly() noexcept;

  const zr::Host host_;
  const zr_device device_id_;
  MpiThread* const thread_;
  const std::unique_ptr<nccl::GpuDevice> device_;
  const std::unique_ptr<nccl::Mark> end_;          // of the last operation
  std::unique_ptr<MpiCommunicator> host_memory_;   // moves the copies; null while this is destroyed
  std::vector<std::shared_ptr<Passage>> started_;  // the operations that MPI may not have ended
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::shared_ptr<Completion>> completions_;  // that may not be resolved
  std::optional<void*> only_stream_;                      // of all operations
  std::optional<Failure> failure_;                        // after which no operation can be executed
  std::set<void*> allocated_;                             // memory of the device
};

}  // namespace mpi
