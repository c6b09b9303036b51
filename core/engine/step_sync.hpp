// Exchanges statistics between the ranks once per step: losses, touched parameters, non-finite elements, the gradient
// norm (docs/numerics.md, sections 6, 7 and 11).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "engine/norm_blocks.hpp"
#include "engine/training_progress.hpp"
#include "engine/weight_digest.hpp"
#include "job/step_context.hpp"
#include "offload/device_updates.hpp"
#include "update/update.hpp"

namespace zr::host::engine {

/// The statistics of a step over all ranks; the same on all ranks.
struct GlobalStats {
  double loss = 0;     // sum over the step's micro-batches, weighted by their weights, divided by `divisor`
  double weight = 0;   // M, or the sum of the micro-batches' weights
  double divisor = 0;  // `weight`, or the number of ranks (gradients.divisor)
  double sum_of_squares = 0;
  int64_t non_finite = 0;  // number of non-finite elements of the reduced gradients
  /// The first parameter, in the model's order, with a non-finite reduced gradient; -1: none.
  int64_t first_param = -1;
  /// The first parameter for which a rank handed over a non-finite gradient, and the first such rank; -1: no rank did,
  /// or the ranks did not check.
  int64_t first_local_param = -1;
  int non_finite_rank = -1;
  int loss_rank = -1;                         // the first rank whose loss was not finite; -1: none
  int64_t tokens = 0;                         // of all ranks
  std::vector<char> touched;                  // by parameter: not 0 if it had a gradient on any rank
  int failed_rank = -1;                       // the first rank whose update has failed during backward; -1: none
  int stop = 0;                               // a signal that a rank received; 0: none
  bool save_failed = false;                   // whether a background save failed on any rank
  bool masters_changed = false;               // whether the program has written to weights on any rank
  std::vector<WeightDigest::Digest> digests;  // by rank
};

/// Training thread only. While the object exists, it passes the results of the communicator's collectives to norm().
class StepSync {
 public:
  /// The arguments of NormBlocks, and what copies final gradients from a device (null: nothing); all outlive the
  /// object.
  StepSync(const job::StepContext& context, const std::vector<update::UpdateSlice>& slices,
           offload::DiskBackedBuffers* disk_buffers, offload::DeviceUpdates* device_updates);
  ~StepSync();
  StepSync(const StepSync&) = delete;

  /// The statistics of this rank.
  struct LocalStats {
    std::vector<Loss> losses;     // by micro-step
    std::vector<double> weights;  // by micro-step
    int64_t tokens;
    const std::vector<char>* touched;  // by parameter: not 0 if it had a gradient
    int64_t first_non_finite;          // the first parameter for which a non-finite gradient was handed over; -1: none
    int stop = 0;                      // the signal that this rank received; 0: none
    bool save_failed = false;          // whether this rank's background save failed
    bool update_failed = false;        // whether this rank's update has failed during backward
    bool masters_changed = false;      // whether the program has written to weights since the last step
    /// Of a step whose gradients are not reduced: non-finite elements of this rank's gradients; first_non_finite is the
    /// first parameter with one. nullopt: of another step.
    std::optional<int64_t> local_non_finite{};
    WeightDigest::Digest digest{};
  };
  /// Call before each micro-step. is_last: of the step; the collectives that are submitted from now on make reduced
  /// gradients final.
  void begin_micro_step(bool is_last);
  /// Calls observer(memory) with the source of each collective of the last micro-step that has ended. [use]
  void on_collective(std::function<void(const zr_view& src)> observer) { on_collective_ = std::move(observer); }
  NormBlocks& norm() { return norm_; }
  const NormBlocks& norm() const { return norm_; }
  /// A part of the statistics that is needed before the others.
  struct Totals {
    double weight;              // sum over all micro-batches, in the order of exchange()
    double divisor;             // as in GlobalStats
    std::vector<char> touched;  // by parameter: not 0 if it had a gradient on any rank
  };
  /// From this rank's weights by micro-step, and touched parameters. Collective.
  Totals totals(const std::vector<double>& weights, const std::vector<char>& touched) const;
  /// Exchanges the statistics. The slices' reduced gradients must be final, unless gradients are not reduced; then the
  /// sum of squares is NaN. Collective.
  GlobalStats exchange(const LocalStats& local);

 private:
  double divisor_of(double weight) const { return by_ranks_ ? comm_.world() : weight; }

  comm::CommRuntime& comm_;
  RecursiveMutex& use_;
  const bool by_ranks_;
  NormBlocks norm_;
  offload::DeviceUpdates* const device_updates_;
  std::function<void(const zr_view& src)> on_collective_;
  std::atomic<int64_t> issued_before_ = 0;  // number of collectives before the current micro-step
};

}  // namespace zr::host::engine
