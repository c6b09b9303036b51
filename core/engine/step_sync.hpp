// What all ranks must know alike once a step: losses, touched parameters, non-finite elements, the norm (NUMERICS.md 6,
// 7, 11).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/norm_blocks.hpp"
#include "engine/step_context.hpp"
#include "engine/weight_digest.hpp"
#include "update/update.hpp"

namespace zr::host {

struct GlobalStats {
  double loss = 0;    // mean over the step's micro-batches, weighted if they are
  double weight = 0;  // M, or the sum of the micro-batches' weights
  double sum_of_squares = 0;
  int64_t non_finite = 0;  // elements of the sums
  /// Where there are any: the first parameter of the model's order that has some, and the first rank that handed over
  /// some of the first parameter of which a rank did (-1: none did, or none looked); and whose loss was not finite.
  int64_t first_param = -1, first_local_param = -1;
  int non_finite_rank = -1, loss_rank = -1;
  int64_t tokens = 0;
  std::vector<char> touched;
  int stop = 0;                               // a signal that some rank got
  bool save_failed = false;                   // a checkpoint in the background
  std::vector<WeightDigest::Digest> digests;  // by rank
};

/// Training thread. While it lives, the communicator's collectives report to norm() what they have summed.
class StepSync {
 public:
  /// What it refers to outlives it; `slices` are this rank's; pages: see NormBlocks.
  StepSync(const RankContext& context, const std::vector<UpdateSlice>& slices, DiskBackedBuffers* pages);
  ~StepSync();
  StepSync(const StepSync&) = delete;

  struct LocalStats {
    std::vector<double> losses, weights;  // by micro-step
    int64_t tokens;
    const std::vector<char>* touched;
    int64_t first_non_finite;  // parameter, of the gradients handed over; -1: none
    int stop = 0;
    bool save_failed = false;
    WeightDigest::Digest digest{};
  };
  NormBlocks& norm() { return norm_; }
  const NormBlocks& norm() const { return norm_; }
  /// Collective. Reads the slices' sums, which must be complete.
  GlobalStats exchange(const LocalStats& local);

 private:
  CommRuntime& comm_;
  NormBlocks norm_;
};

}  // namespace zr::host
