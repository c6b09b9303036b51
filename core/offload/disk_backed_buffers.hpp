// Reduced gradients and weight shards on disk. The strategy is bound to addresses without memory. This class gives them
// staging memory while a collective uses them, and reads, writes and updates their data in parts.
//
// A range that a collective in progress will write is not read before that collective has ended. A range that was read
// ahead and is written before its use is dropped. A collective that is larger than the planned staging memory gets
// more, which is planned and counted then. The communicator allocates staging memory, so that peers read it in place.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/round_up.hpp"
#include "comm/comm_runtime.hpp"
#include "offload/disk_backed_buffer.hpp"
#include "offload/optimizer_states.hpp"
#include "offload/staging_allocator.hpp"
#include "plan/disk_staging.hpp"
#include "plan/plan.hpp"
#include "update/update.hpp"
#include "zr/mutex.hpp"

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
  uint64_t stage(zr_coll& coll) override ZR_EXCLUDES(mutex_);
  /// Starts to write the results of a collective to disk.
  void unstage(uint64_t number, bool succeeded) noexcept override ZR_EXCLUDES(mutex_);
  /// Ends the recorded order of collectives: the next step reads ahead in this order.
  void step_end() ZR_EXCLUDES(mutex_);

  /// Calls fn(memory, first, count) over all elements of a view of disk-backed addresses, in parts. With Access::read,
  /// parts begin at norm blocks; with Access::write, fn must write all elements. `what` names the elements in errors.
  void visit(const zr_view& view, OptimizerStates::Access access, const std::string& what,
             const std::function<void(void* memory, int64_t first, int64_t count)>& fn) ZR_EXCLUDES(mutex_);
  /// Passes slices of touched parameters to `work` in parts whose reduced gradients and weights are in memory, then
  /// writes the new weights to disk.
  void for_each_slice_in_memory(const std::vector<update::UpdateSlice>& slices, const std::vector<char>& touched,
                                const std::function<void(const std::vector<update::UpdateSlice>& slices)>& work)
      ZR_EXCLUDES(mutex_);

  /// Waits of the training thread. Not from a function that visit() or for_each_slice_in_memory() calls: they hold the
  /// mutex.
  TierWaits waits() const ZR_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return waits_;
  }
  /// Number of ranges that collectives read. The same restriction as for waits().
  int64_t reads() const ZR_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return reads_;
  }
  /// Number of these that were read ahead. The same restriction as for waits().
  int64_t reads_ahead() const ZR_EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return reads_ahead_;
  }

 private:
  struct BufferRange {  // a range of a buffer, and its staging memory
    DiskBackedBuffer* buffer = nullptr;
    int64_t from = 0, to = 0;  // bytes
    char* staging = nullptr;
    uint64_t transfer = 0;               // number of its transfer; 0: none
    bool reads = false, writes = false;  // a collective reads its elements, writes them, or both
    std::string what{};
    int64_t staging_bytes() const { return buffer->block_end(to) - buffer->block_begin(from); }
    char* data() const { return staging + from - buffer->block_begin(from); }
    bool overlaps(const BufferRange& other) const {
      return buffer == other.buffer && buffer->block_begin(from) < buffer->block_end(other.to) &&
             buffer->block_begin(other.from) < buffer->block_end(to);
    }
  };
  struct Operands {  // of a collective; an operand in memory has no buffer
    BufferRange src, dst;
    bool src_in_dst = false;  // the source is a part of the destination, and uses its staging memory
  };
  struct RecordedAccess {  // an entry of the recorded order
    BufferRange range;
    bool reads;
  };
  struct Chunk {
    std::vector<update::UpdateSlice> slices;
    std::vector<BufferRange> reduced_gradients, weights;
  };
  struct UpdateParts {  // the slices of an update
    std::vector<update::UpdateSlice> in_memory;
    std::vector<Chunk> chunks;  // at least one, which may be empty
  };
  struct CommunicatorFree {
    comm::CommRuntime* comm;
    void operator()(char* memory) const { comm->free(memory); }
  };
  struct PeerBuffer {  // memory that peers can read
    std::unique_ptr<char, CommunicatorFree> memory;
    RegisteredMemory registered;
  };
  DiskBackedBuffer* find(const void* at) const;
  BufferRange range_of(const zr_view& view) const;
  Operands operands_of(const zr_coll& coll) const;
  int64_t staging_bytes_of(const BufferRange& range) const {
    return round_up(range.staging_bytes(), disk_staging_.align);
  }
  void grow(int64_t bytes) ZR_REQUIRES(mutex_);
  bool will_be_written(const BufferRange& range) const ZR_REQUIRES(mutex_);
  bool allocate_staging(BufferRange& range) ZR_REQUIRES(mutex_);
  void release_finished_writes() ZR_REQUIRES(mutex_);
  void discard_prefetched(std::list<BufferRange>::iterator at) ZR_REQUIRES(mutex_);
  void discard_prefetched(const BufferRange& overlapping) ZR_REQUIRES(mutex_);
  bool take_prefetched(BufferRange& range) ZR_REQUIRES(mutex_);
  bool start_staging(std::vector<BufferRange>& ranges) ZR_REQUIRES(mutex_);
  void finish_staging(std::vector<BufferRange>& ranges, zr_coll& coll) ZR_REQUIRES(mutex_);
  void stage_src_in_dst(BufferRange src, const BufferRange& dst, zr_coll& coll) ZR_REQUIRES(mutex_);
  void read(BufferRange& range) ZR_REQUIRES(mutex_);
  void wait(const BufferRange& range, double& seconds);
  void wait_all(const std::vector<BufferRange>& ranges, double& seconds);
  void record_access(const BufferRange& range, bool reads) ZR_REQUIRES(mutex_);
  void prefetch() ZR_REQUIRES(mutex_);
  bool fill(Chunk& chunk, update::UpdateSlice& rest) const;
  UpdateParts parts_of_update(const std::vector<update::UpdateSlice>& slices, const std::vector<char>& touched) const;
  void start_reads(Chunk& chunk, char* staging) ZR_REQUIRES(mutex_);
  void start_chunk(std::vector<Chunk>& chunks, std::size_t index) ZR_REQUIRES(mutex_);
  std::string name_of(const char* what, const update::UpdateSlice& slice) const;

  const plan::MemoryPlan& plan_;
  comm::CommRuntime& comm_;
  Ledger& ledger_;
  plan::DiskStaging disk_staging_;
  std::vector<TierStore*> stores_;  // tiers of the buffers
  std::vector<PeerBuffer> peer_memory_ ZR_GUARDED_BY(mutex_);
  TrackedMemory chunks_;         // kChunksInFlight of them
  RegisteredMemory registered_;  // of chunks_
  std::vector<std::unique_ptr<DiskBackedBuffer>>
      buffers_;  // by buffer of the plan; null: in memory. Destroyed first, because its destructor waits
  mutable Mutex mutex_;
  StagingAllocator staging_ ZR_GUARDED_BY(mutex_);                                       // in peer_memory_
  std::unordered_map<uint64_t, std::vector<BufferRange>> staged_ ZR_GUARDED_BY(mutex_);  // by number
  std::list<BufferRange> prefetched_ ZR_GUARDED_BY(mutex_);                              // read, or being read
  std::list<BufferRange> writing_ ZR_GUARDED_BY(mutex_);                                 // being written
  std::vector<RecordedAccess> last_step_ ZR_GUARDED_BY(mutex_), this_step_ ZR_GUARDED_BY(mutex_);
  bool order_matches_ ZR_GUARDED_BY(mutex_) = false;  // this step has the order of the last one so far
  uint64_t last_number_ ZR_GUARDED_BY(mutex_) = 0;
  int64_t reads_ ZR_GUARDED_BY(mutex_) = 0, reads_ahead_ ZR_GUARDED_BY(mutex_) = 0;
  std::exception_ptr failure_ ZR_GUARDED_BY(mutex_);  // of a write; the next call throws it
  TierWaits waits_ ZR_GUARDED_BY(mutex_);
};

}  // namespace zr::host::offload
