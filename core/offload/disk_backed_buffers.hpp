// Reduced gradients and weight shards on disk. The strategy is bound to addresses without memory. This class gives them
// staging memory while a collective uses them, and reads, writes and updates their data in parts.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/comm_runtime.hpp"
#include "offload/disk_backed_buffer.hpp"
#include "offload/optimizer_states.hpp"
#include "offload/staging_allocator.hpp"
#include "plan/disk_staging.hpp"
#include "plan/plan.hpp"
#include "update/update.hpp"

namespace zr::host::offload {

/// Calls are [use], one at a time.
class DiskBackedBuffers final : public comm::CollectiveStaging {
 public:
  /// Reserves allocations on the plan's tiers and the memory that DiskStaging counts. Keeps references to all
  /// arguments.
  DiskBackedBuffers(const plan::MemoryPlan& plan, Tiers& tiers, comm::CommRuntime& comm, Ledger& ledger);
  DiskBackedBuffers(const DiskBackedBuffers&) = delete;

  /// The first address of a buffer of the plan; null if the buffer is in memory.
  char* base(std::size_t buffer) const { return buffers_[buffer] ? buffers_[buffer]->base() : nullptr; }
  /// True if the address belongs to a disk-backed buffer.
  bool holds(const void* at) const { return find(at) != nullptr; }

  /// Implements CollectiveStaging: reads a collective's input into staging memory, unless it was read ahead.
  uint64_t stage(zr_coll& coll) override;
  /// Starts to write the results of a collective to disk.
  void unstage(uint64_t number, bool well) noexcept override;
  /// Ends the recorded order of collectives: the next step reads ahead in this order.
  void step_end();

  /// Calls fn(memory, first, count) over all elements of a view of disk-backed addresses, in parts. With Access::read,
  /// parts begin at norm blocks; with Access::write, fn must write all elements. `what` names the elements in errors.
  void visit(const zr_view& view, OptimizerStates::Access use, const std::string& what,
             const std::function<void(void* memory, int64_t first, int64_t count)>& fn);
  /// Passes slices of touched parameters to `work` in parts whose reduced gradients and weights are in memory, then
  /// writes the new weights to disk.
  void update(const std::vector<update::UpdateSlice>& slices, const std::vector<char>& touched,
              const std::function<void(const std::vector<update::UpdateSlice>& slices)>& work);

  const TierWaits& waits() const { return waits_; }  // of the training thread
  /// Number of ranges that collectives read.
  int64_t reads() const { return reads_; }
  /// Number of these that were read ahead.
  int64_t reads_ahead() const { return reads_ahead_; }

 private:
  struct BufferRange {  // a range of a buffer, and its staging memory
    DiskBackedBuffer* buffer = nullptr;
    int64_t from = 0, to = 0;  // bytes
    char* staging = nullptr;
    uint64_t move = 0;  // number of its transfer; 0: none
    bool writes = false;
    std::string what{};
    int64_t staging_bytes() const { return buffer->block_end(to) - buffer->block_begin(from); }
    char* data() const { return staging + from - buffer->block_begin(from); }
    bool overlaps(const BufferRange& other) const {
      return buffer == other.buffer && buffer->block_begin(from) < buffer->block_end(other.to) &&
             buffer->block_begin(other.from) < buffer->block_end(to);
    }
  };
  struct Seen {  // an entry of the recorded order
    BufferRange range;
    bool reads;
  };
  struct Chunk {
    std::vector<update::UpdateSlice> slices;
    std::vector<BufferRange> reduced_gradients, weights;
  };
  struct Free {
    comm::CommRuntime* comm;
    void operator()(char* memory) const { comm->free(memory); }
  };
  struct PeerBuffer {  // memory that peers can read
    std::unique_ptr<char, Free> memory;
    RegisteredMemory registered;
  };
  DiskBackedBuffer* find(const void* at) const;
  BufferRange range_of(const zr_view& view) const;
  int64_t staging_bytes_of(const BufferRange& range) const {
    return (range.staging_bytes() + disk_staging_.align - 1) / disk_staging_.align * disk_staging_.align;
  }
  void grow(int64_t bytes);
  bool is_entered_to_write(const BufferRange& range) const;
  bool take_staging(BufferRange& range);
  void sweep();
  void drop_ahead(std::list<BufferRange>::iterator at);
  void drop_ahead(const BufferRange& overlapping);
  void read(BufferRange& range);
  void wait(const BufferRange& range, double& seconds);
  void follow(const BufferRange& range, bool reads);
  void read_ahead();
  bool fill(Chunk& chunk, update::UpdateSlice& rest) const;
  void begin(Chunk& chunk, char* staging);
  std::string name_of(const char* what, const update::UpdateSlice& slice) const;

  const plan::MemoryPlan& plan_;
  comm::CommRuntime& comm_;
  Ledger& ledger_;
  plan::DiskStaging disk_staging_;
  std::vector<TierStore*> stores_;  // tiers of the buffers
  std::vector<PeerBuffer> peer_memory_;
  TrackedMemory chunks_;         // kChunksInFlight of them
  RegisteredMemory registered_;  // of chunks_
  std::vector<std::unique_ptr<DiskBackedBuffer>>
      buffers_;  // by buffer of the plan; null: in memory. Destroyed first, because its destructor waits
  mutable std::mutex mutex_;
  StagingAllocator staging_;                                       // in peer_memory_
  std::unordered_map<uint64_t, std::vector<BufferRange>> staged_;  // by number
  std::list<BufferRange> ahead_, behind_;                          // read ahead; being written
  std::vector<Seen> last_step_, this_step_;
  bool follows_ = false;  // this step has the order of the last one so far
  uint64_t last_ = 0;
  int64_t reads_ = 0, reads_ahead_ = 0;
  std::exception_ptr failed_;
  TierWaits waits_;
};

}  // namespace zr::host::offload
