// Ordered reduction of the norm blocks of all ranks, in the model's order (docs/numerics.md, section 7). The ranks
// exchange one window of blocks at a time, so a rank stores its own blocks and one window, not those of all ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "job/step_context.hpp"
#include "offload/disk_backed_buffers.hpp"
#include "update/norm.hpp"
#include "update/update.hpp"

namespace zr::host::engine {

/// Training thread only, except gradients_final().
class NormBlocks {
 public:
  /// All arguments outlive the object. `slices`: what this rank updates. disk_buffers: the buffers that contain reduced
  /// gradients on a disk tier; null: all are in memory. window: number of blocks per exchange.
  NormBlocks(const job::RankContext& context, const std::vector<update::UpdateSlice>& slices,
             offload::DiskBackedBuffers* disk_buffers = nullptr, int64_t window = plan::kNormBlockWindow);
  ~NormBlocks();
  NormBlocks(const NormBlocks&) = delete;

  /// True if every rank computes all blocks itself, without an exchange.
  bool replicated() const { return blocks_.replicated; }
  /// Call before each micro-step. is_last: of the step; from now on reduced gradients are final, so gradients_final()
  /// adds up their blocks.
  void begin_micro_step(bool is_last);
  /// Call when these reduced gradients are final: adds up their blocks while they are in the cache. `values`: their
  /// memory, also if their addresses are disk-backed. [use]
  void gradients_final(const zr_view& gradients, const void* values);
  /// Whether gradients_final() uses the thread pool. By default it does not, because autograd's threads compute
  /// meanwhile, and the gradients are in this thread's cache; but if the model computes on another device, they are
  /// not.
  void use_pool(bool on) { uses_pool_ = on; }
  /// From now on reduced gradients are on a device: sum() adds up all blocks, and gradients_final() does nothing.
  /// sums(values, out): the sums of all blocks of the views, in their order, to host memory. count: the non-finite
  /// elements of a view.
  struct OnDevice {
    std::function<void(const std::vector<zr_view>& values, double* out)> sums;
    std::function<int64_t(const zr_view& values)> count_non_finite;
  };
  void use_device(OnDevice device) { device_ = std::move(device); }
  /// Calls observer(first, elements, finite) for the blocks that gradients_final() adds up: their reduced gradients,
  /// and whether all of them are finite. [use]
  using Observer = std::function<void(const void* first, int64_t elements, bool finite)>;
  void on_final(Observer observer) { on_final_ = std::move(observer); }
  /// Adds up this rank's blocks that gradients_final() has not added up; returns the number of non-finite elements in
  /// all its blocks.
  int64_t sum();
  /// Number of blocks that this rank adds up per step.
  int64_t own_blocks() const { return std::ssize(ready_); }
  /// Number of these that were added up before sum() in the last step.
  int64_t blocks_summed_early() const { return blocks_summed_early_; }
  /// The sum over all blocks, and the first parameter, in the model's order, with a non-finite block; -1: none.
  struct Norm {
    double sum_of_squares = 0;
    int64_t first_non_finite = -1;
  };
  /// Collective, after sum().
  Norm ordered_sum();
  /// The sum of other fp32 values that are distributed like the reduced gradients, block by block in the same order.
  /// values(param, first, count): this rank's values for elements of a parameter, in memory. Collective, between steps.
  double ordered_sum_of(const std::function<zr_view(uint32_t param, int64_t first, int64_t count)>& values);

 private:
  struct BlockRange {
    int64_t block, count;  // in blocks, in the model's order
  };
  struct Elements {
    uint32_t param;
    int64_t first, count;
  };
  void add_contribution(uint32_t param, const plan::Segment& segment, const std::vector<update::UpdateSlice>& slices,
                        std::size_t& slice);
  void accumulate(const double* blocks, int64_t first, int64_t count, Norm& norm) const;
  void sum_missing();
  void gather(int64_t begin, int64_t end);
  int64_t non_finite_of(const zr_view& block) const;

  comm::CommRuntime& comm_;
  ThreadPool& pool_;
  bool uses_pool_ = false;
  const plan::MemoryPlan& plan_;
  Ledger& ledger_;
  offload::DiskBackedBuffers* disk_buffers_;
  const plan::MemoryPlan::NormBlockCounts blocks_;
  const int64_t window_;
  std::vector<int64_t> first_block_;                     // by parameter
  std::vector<std::vector<BlockRange>> ranges_by_rank_;  // by rank, ascending: blocks that it contributes
  std::vector<update::NormBlockRange> own_ranges_;       // reduced gradients of this rank's blocks, in that order
  std::vector<Elements> own_elements_;                   // the same, as elements of parameters
  std::vector<std::size_t> next_range_;                  // by rank: its first range that is not fully gathered
  std::vector<std::pair<const char*, std::size_t>>
      ranges_by_address_;    // address of reduced gradients -> index in own_ranges_, sorted
  std::vector<char> ready_;  // by own block: not 0 if it has been added up
  int64_t blocks_summed_early_ = 0;
  bool gradients_are_final_ = false;
  Observer on_final_;
  OnDevice device_;              // empty: reduced gradients are in host memory
  int64_t sent_ = 0;             // number of own blocks exchanged so far
  double* own_sums_ = nullptr;   // by own block; in memory that peers can read
  double* received_ = nullptr;   // one window, by rank; in memory that peers can read
  std::vector<double> ordered_;  // the same window, in the model's order
};

/// The functions that add up norm blocks on the device of the context, which outlives them.
NormBlocks::OnDevice norm_on_device(const job::StepContext& context);

}  // namespace zr::host::engine
