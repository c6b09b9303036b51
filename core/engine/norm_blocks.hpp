// The blocks of the gradient norm, of all ranks, folded in the job's logical order (NUMERICS.md 7), a window of them at
// a time: what a rank holds for it does not grow with the model but by its own blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/step_context.hpp"
#include "offload/disk_backed_buffers.hpp"
#include "update/norm.hpp"
#include "update/update.hpp"

namespace zr::host {

class NormBlocks {
 public:
  /// What it refers to outlives it; `slices` are this rank's. pages: where sums stand that are in no memory; null:
  /// there are none. window: blocks that travel at a time.
  NormBlocks(const RankContext& context, const std::vector<UpdateSlice>& slices, DiskBackedBuffers* pages = nullptr,
             int64_t window = kNormBlockWindow);
  ~NormBlocks();
  NormBlocks(const NormBlocks&) = delete;

  /// Every rank has all blocks: nothing travels.
  bool everywhere() const { return blocks_.everywhere; }
  /// From now on sums are those of a step's last micro-batch: arrived() takes their blocks.
  void expect();
  /// These sums are as they will be: their blocks are added up while they are in the cache. `values`: where they are in
  /// memory now. [use]
  void arrived(const zr_view& sums, const void* values);
  /// Sums up what has not arrived of this rank's blocks; returns how many of their elements are not finite.
  int64_t sum();
  /// Leaves that this rank adds up in a step; of those of the last, how many had arrived before sum().
  int64_t own() const { return std::ssize(ready_); }
  int64_t early() const { return early_; }
  /// The sum over all blocks, and the first parameter of the model's order with a block that is not finite; -1: none.
  struct Norm {
    double sum_of_squares = 0;
    int64_t first_non_finite = -1;
  };
  /// Collective, after sum().
  Norm ordered_sum();

 private:
  struct Run {
    int64_t block, count;  // blocks, in the job's logical order
  };
  void provide(uint32_t param, const Segment& segment, const std::vector<UpdateSlice>& slices, std::size_t& slice);
  void take(const double* blocks, int64_t first, int64_t count, Norm& norm) const;
  void gather(int64_t begin, int64_t end);
  int64_t non_finite_of(const zr_view& block) const;

  CommRuntime& comm_;
  ThreadPool& pool_;
  const MemoryPlan& plan_;
  Ledger& ledger_;
  DiskBackedBuffers* disk_buffers_;
  const MemoryPlan::NormBlocks blocks_;
  const int64_t window_;
  std::vector<int64_t> first_block_;                         // by parameter
  std::vector<std::vector<Run>> provides_;                   // by rank, ascending: blocks it hands to the others
  std::vector<NormBlockRun> own_;                            // sums behind this rank's, in that order
  std::vector<std::size_t> at_;                              // by rank: the first run that is not gathered
  std::vector<std::pair<const char*, std::size_t>> run_at_;  // of own_, by the address of their sums
  std::vector<char> ready_;                                  // by own block: it has been added up
  int64_t early_ = 0;
  bool expects_ = false;
  int64_t sent_ = 0;             // of own blocks
  double* own_sums_ = nullptr;   // own blocks: in memory peers can read, as the next
  double* received_ = nullptr;   // a window, by rank
  std::vector<double> ordered_;  // the same, in logical order
};

}  // namespace zr::host
