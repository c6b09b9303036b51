// Sums over full parameters for optimizers with the extension "zr.optimizer.partial_sums/1": every rank adds up its
// blocks, the ranks exchange them, and each rank adds the blocks of its parameters in ascending order.
#pragma once

#include <cstdint>
#include <vector>

#include "job/step_context.hpp"
#include "update/update.hpp"

namespace zr::host::engine {

/// Training thread only, except partial() and totals(), which any thread may call during a pass.
class PartialSums {
 public:
  /// `context` outlives the object. batch: the most sums per exchange; more if one parameter has more. Collective if
  /// any parameter has passes.
  explicit PartialSums(const job::RankContext& context, int64_t batch = plan::kSumBatch);
  ~PartialSums();
  PartialSums(const PartialSums&) = delete;

  /// The largest number of passes over a parameter before its update.
  uint32_t passes() const { return passes_; }
  /// Call before each pass over the slices: sets all sums of the pass to zero.
  void begin(uint32_t pass);
  /// The sums of the block of this rank that begins at element `first` of a parameter; those of the next blocks follow.
  double* partial(uint32_t param, int64_t first);
  /// The totals of all earlier passes over a parameter that this rank updates.
  const double* totals(uint32_t param) const { return totals_.data() + first_total_[param]; }
  /// Adds up the blocks of all ranks, in ascending order. touched: by parameter; 0: not part of this step, equal on all
  /// ranks. Collective, after the pass.
  void end(const std::vector<char>& touched);

 private:
  struct OwnPart {  // a reduced-gradient piece of a parameter with passes
    uint32_t param;
    int64_t first, count;  // elements
    int64_t offset;        // in own_, for the largest number of sums
  };
  int64_t width(uint32_t param) const;  // sums per block in this pass; 0: none
  void exchange(const std::vector<uint32_t>& params);
  void add_blocks(uint32_t param, const double* blocks, int64_t count);

  const job::RankContext& context_;
  const int64_t batch_;
  uint32_t passes_ = 0, pass_ = 0;
  std::vector<OwnPart> parts_;        // ascending
  std::vector<int64_t> first_total_;  // by parameter: index in totals_; -1: this rank does not update it
  std::vector<double> own_, totals_;
  double *sent_ = nullptr, *received_ = nullptr;  // one batch; in memory that peers can read
};

}  // namespace zr::host::engine
