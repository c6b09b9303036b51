// The memory of a plan's buffers: allocated by the communicator, or backed by a disk tier.
#pragma once

#include <memory>
#include <vector>

#include "job/step_context.hpp"
#include "offload/disk_backed_buffers.hpp"
#include "offload/tier.hpp"

namespace zr::host::state {

/// Training thread only; this rule does not apply to the contents of the memory.
class StateBuffers {
 public:
  /// Allocates zeroed memory in the plan's order. Collective if ranks share memory. Keeps references to both arguments.
  StateBuffers(const job::RankContext& context, offload::Tiers& tiers);
  StateBuffers(const StateBuffers&) = delete;

  /// By buffer of the plan: the address at which this rank reads and writes it. An address in disk_buffers() is
  /// disk-backed: it has no memory.
  const std::vector<void*>& memory() const { return memory_; }
  /// By buffer of the plan: the read-only address if the ranks share the buffer; null: it is not shared.
  const std::vector<const void*>& readers() const { return readers_; }
  /// By buffer of the plan: memory() as views, which the strategy is bound to.
  const std::vector<zr_view>& views() const { return views_; }
  /// The buffers on disk; null: all are in memory.
  offload::DiskBackedBuffers* disk_buffers() const { return disk_buffers_.get(); }
  /// Frees the buffers that no parameter of the model can be bound to. The destructor frees the others.
  void free_all_but_weights();

 private:
  struct DiskBuffersDeleter {
    comm::CommRuntime* comm;
    void operator()(offload::DiskBackedBuffers* disk_buffers) const {
      comm->set_collective_staging(nullptr);
      delete disk_buffers;
    }
  };
  struct Free {
    comm::CommRuntime* comm;
    void operator()(void* memory) const { comm->free(memory); }
  };
  void allocate(const plan::Buffer& buffer, Tier tier);

  const job::RankContext context_;
  std::vector<std::unique_ptr<void, Free>> owned_;  // by buffer of the plan; null: on disk
  std::unique_ptr<offload::DiskBackedBuffers, DiskBuffersDeleter> disk_buffers_;
  std::vector<void*> memory_;
  std::vector<const void*> readers_;
  std::vector<zr_view> views_;
};

}  // namespace zr::host::state
