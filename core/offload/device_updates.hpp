// Updates of states in host memory or on disk while gradients and weights are in memory of a device: gradients are
// copied to pinned memory, during backward or before the update, and new weights back while the next ones are computed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/copy_stream.hpp"
#include "base/device_memory.hpp"
#include "base/ledger.hpp"
#include "offload/optimizer_states.hpp"
#include "plan/device_staging.hpp"
#include "plan/plan.hpp"
#include "update/update.hpp"

namespace zr::host::offload {

/// One call at a time.
class DeviceUpdates {
 public:
  /// Allocates the planned memory (plan::MemoryPlan::device_staging). buffers: those of the plan, on the device. Keeps
  /// references to the plan, the ledger and the device.
  DeviceUpdates(const plan::MemoryPlan& plan, const std::vector<zr_view>& buffers, DeviceMemory& device,
                Ledger& ledger);
  DeviceUpdates(const DeviceUpdates&) = delete;

  /// Call before each micro-step. is_last: of the step; from now on gradients_final() copies gradients, if the plan has
  /// memory for that.
  void begin_micro_step(bool is_last);
  /// Call when operations are enqueued after which these reduced gradients are final: enqueues their copies. Memory
  /// without reduced gradients has no effect. unchanged: a part of them that was final before; no elements: none. Any
  /// thread.
  void gradients_final(const zr_view& gradients, const zr_view& unchanged = {});
  /// Calls work(slices) for the touched slices in parts, whose gradients and weights are then in host memory. New
  /// weights are on the device when what it computes next begins. Slices are cut where their parameters may be cut.
  void for_each_slice_in_memory(const std::vector<update::UpdateSlice>& slices, const std::vector<char>& touched,
                                const std::function<void(const std::vector<update::UpdateSlice>& slices)>& work);

  /// Called after each wait of the training thread.
  void on_wait(OptimizerStates::WaitObserver observer) { on_wait_ = std::move(observer); }
  /// Elements of gradients that gradients_final() has copied since the last begin_micro_step().
  int64_t copied_early() const { return copied_early_; }

 private:
  // Pinned memory that is counted in the ledger.
  class Memory {
   public:
    Memory() = default;
    Memory(DeviceMemory& device, Ledger& ledger, int64_t bytes);
    ~Memory();
    Memory(Memory&& other) noexcept { *this = std::move(other); }
    Memory& operator=(Memory&& other) noexcept;  // swaps
    explicit operator bool() const { return memory_ != nullptr; }
    const PinnedMemory& operator*() const { return *memory_; }
    const PinnedMemory* operator->() const { return memory_.get(); }

   private:
    std::unique_ptr<PinnedMemory> memory_;
    Ledger* ledger_ = nullptr;
    int64_t bytes_ = 0;
  };
  struct Block {
    const char* begin;                                // of the gradients on the device
    int64_t count;                                    // elements
    const PinnedMemory* gradients;                    // null: in the slot
    int64_t offset;                                   // elements in it
    std::vector<std::pair<int64_t, int64_t>> copied;  // elements [first, second) that gradients_final() has copied
  };
  struct Slot {
    Memory memory;
    std::unique_ptr<CopyStream::Mark> uploaded;  // the last copies from it; null: none
  };
  struct SliceRange {
    const update::UpdateSlice* slice;
    int64_t skip, count;  // elements of the slice
    int64_t at;           // element of the block
  };
  struct Batch {  // the parts of one block
    std::size_t block;
    std::vector<SliceRange> parts;
    std::size_t slot = 0;
    std::unique_ptr<CopyStream::Mark> downloaded{};
  };
  std::size_t block_at(const void* gradient) const;
  bool was_copied(const zr_view& gradients) const;
  void copy(const char* begin, const char* end, bool& follows);
  std::vector<Batch> batches_of(const std::vector<update::UpdateSlice>& slices, const std::vector<char>& touched) const;
  void start(Batch& batch);
  std::vector<update::UpdateSlice> on_host(const Batch& batch) const;
  void upload(const Batch& batch);
  void wait(CopyStream::Mark& mark, const char* what) const;

  const plan::MemoryPlan& plan_;
  DeviceMemory& device_;
  std::vector<Memory> gradients_;  // of all blocks
  std::vector<Block> blocks_;      // by address
  std::vector<Slot> slots_;
  std::size_t next_slot_ = 0;
  bool copies_ = false;  // gradients_final() copies
  int64_t copied_early_ = 0;
  OptimizerStates::WaitObserver on_wait_;
  std::unique_ptr<CopyStream> downloads_, uploads_;  // destroyed first, because their destructors wait
};

}  // namespace zr::host::offload
