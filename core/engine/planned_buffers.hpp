// The memory of a plan's buffers: of the communicator, or backed by a disk tier.
#pragma once

#include <memory>
#include <vector>

#include "engine/step_context.hpp"
#include "offload/disk_backed_buffers.hpp"
#include "offload/tier.hpp"

namespace zr::host {

/// Training thread only; the memory itself is for whoever the plan gives it to.
class PlannedBuffers {
 public:
  /// Allocates in the plan's order, zeroed. Collective where ranks share memory. Refers to both.
  PlannedBuffers(const RankContext& context, Tiers& tiers);
  PlannedBuffers(const PlannedBuffers&) = delete;

  /// By buffer of the plan: where this rank reads and writes it; an address of pages() has no memory.
  const std::vector<void*>& memory() const { return memory_; }
  /// Likewise: where a buffer that ranks share is read; null: it is not shared.
  const std::vector<const void*>& readers() const { return readers_; }
  /// By buffer of the plan: memory(), as the strategy is bound with it.
  const std::vector<zr_view>& views() const { return views_; }
  /// Buffers on disk; null: all are in memory.
  DiskBackedBuffers* pages() const { return disk_buffers_.get(); }
  /// Frees what no parameter of the model may be bound to; the rest goes with the object.
  void free_all_but_weights();

 private:
  struct HugePageDeleter {
    CommRuntime* comm;
    void operator()(DiskBackedBuffers* pages) const {
      comm->set_collective_staging(nullptr);
      delete pages;
    }
  };
  struct Free {
    CommRuntime* comm;
    void operator()(void* memory) const { comm->free(memory); }
  };
  void allocate(const Buffer& buffer, Tier tier);

  const RankContext context_;
  std::vector<std::unique_ptr<void, Free>> owned_;  // by buffer of the plan; null: on disk
  std::unique_ptr<DiskBackedBuffers, HugePageDeleter> disk_buffers_;
  std::vector<void*> memory_;
  std::vector<const void*> readers_;
  std::vector<zr_view> views_;
};

}  // namespace zr::host
