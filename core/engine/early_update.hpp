// Updates masters and optimizer states on tiers while backward computes the remaining gradients. Each part is updated
// as soon as its reduced gradients are final, with the arguments that the update after backward would have: the result
// is the same to the bit.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "base/thread_pool.hpp"
#include "base/trace.hpp"
#include "job/step_context.hpp"
#include "offload/early_tiles.hpp"
#include "offload/optimizer_states.hpp"
#include "state/sharded_state.hpp"
#include "update/update.hpp"
#include "zr/mutex.hpp"

namespace zr::host::engine {

/// For steps that cannot be skipped or clipped: states are updated in place. Backward may still use the weights, so new
/// ones replace the reduced gradients until adopt(). Training thread only, except gradients_reduced(),
/// collective_read() and parts_updated().
class EarlyUpdate {
 public:
  /// Keeps references to `context` and `state`. trace: null: no trace.
  EarlyUpdate(const job::StepContext& context, state::ShardedState& state, std::vector<update::Optimizer> optimizers,
              Trace* trace);
  ~EarlyUpdate();  // waits for the tile in progress
  EarlyUpdate(const EarlyUpdate&) = delete;

  /// The arguments of the update.
  struct Input {
    float grad_mul;
    int64_t number;              // of the update; the first is 1
    std::vector<int64_t> steps;  // by parameter: number of its updates, including this one
    std::vector<double> rates;   // by parameter: learning rate
  };
  /// Call before the last backward of a step. The first step of a job only records how often collectives use each part
  /// of the reduced gradients, and in what order: gradients are final after their last use.
  /// touches(param): whether a gradient of the step for this parameter is known; called by any thread.
  void begin(Input input, std::function<bool(uint32_t param)> touches);
  /// Reduced gradients from `first` on are complete, and were read for the norm. finite: all of them. Any thread.
  void gradients_reduced(const void* first, int64_t elements, bool finite) ZR_EXCLUDES(mutex_);
  /// A collective has read this memory. Any thread.
  void collective_read(const zr_view& memory) ZR_EXCLUDES(mutex_);
  /// Updates, together with the worker, what is left of what could begin. Throws the worker's failure, and
  /// InternalError if a collective used gradients after their update. Without effect unless begin() was called since.
  void finish() ZR_EXCLUDES(mutex_);
  /// Ends what begin() began as soon as the worker is idle. Call it before a collective has used gradients of the last
  /// micro-step, or if training cannot continue. Returns the worker's failure, or null.
  std::exception_ptr abandon() ZR_EXCLUDES(mutex_);
  /// The collectives of a step may change: the next step records them again. Between steps.
  void forget_order() ZR_EXCLUDES(mutex_);
  /// Elements updated since begin(). After finish().
  int64_t elements_updated() const;
  /// Number of parts, tiles on disk and slices in host memory, that were updated since begin(). Any thread.
  int64_t parts_updated() const ZR_EXCLUDES(mutex_);
  /// Copies the new weights to their place, and returns what the rest of the update skips. After finish().
  const state::ShardedState::Updated& adopt();
  /// What early updates spend time on.
  enum class Work { update, read, write };  // read, write: waits for the tier
  /// The seconds so far. What finish() waits for the tier is also part of OptimizerStates::waits().
  double seconds(Work work) const ZR_EXCLUDES(mutex_);

  /// Elements on tiers that this rank updates per step; how many of them were updated early in the last step; and the
  /// bytes of their states and masters.
  int64_t elements() const { return elements_; }
  int64_t elements_early() const { return elements_early_; }
  int64_t bytes_early() const { return bytes_early_; }

 private:
  struct UpdateGroup {  // is updated at once
    bool on_disk;
    std::size_t index;  // of the tile, or in ShardedState::staged()
    std::vector<update::UpdateSlice> slices;
    int64_t elements = 0, bytes = 0, blocks = 0;  // bytes: of states and masters
    int64_t missing = 0;                          // blocks whose gradients are not final
    bool is_ready = false;                        // none is missing
    int64_t last_use = 0;  // of its gradients, in the first step: a number that increases with time
    bool is_updated = false;
  };
  struct GradientRange {  // of a group
    const char* gradients;
    int64_t elements;
    std::size_t group, first_block;  // first_block: in uses_
    int64_t lead;                    // elements of its first norm block that belong to another part
  };
  struct Uses {  // of a block of reduced gradients by collectives, the reduction included
    uint16_t in_first_step = 0, in_this_step = 0;
  };
  void add_group(bool on_disk, std::size_t index, const std::vector<update::UpdateSlice>& slices);
  template <class F>
  void for_each_block(const void* first, int64_t bytes, const F& fn) ZR_REQUIRES(mutex_);
  void use(Uses& uses, std::size_t group) ZR_REQUIRES(mutex_);
  void work() ZR_EXCLUDES(mutex_);
  void update(UpdateGroup& group, ThreadPool& pool, const char* track);
  void ended_locked(const std::exception_ptr& failure) ZR_REQUIRES(mutex_);
  void help() ZR_EXCLUDES(mutex_);
  void record(Work work, Trace::Time begin, const char* track) ZR_EXCLUDES(mutex_);
  void read_ahead();
  void reset_uses() ZR_REQUIRES(mutex_);
  void run_on_both(const std::vector<update::UpdateSlice>& slices,
                   const std::function<void(ThreadPool&, const std::vector<update::UpdateSlice>&)>& fn)
      ZR_EXCLUDES(mutex_);

  const job::StepContext& context_;
  state::ShardedState& state_;
  const std::vector<update::Optimizer> optimizers_;
  Trace* const trace_;
  offload::EarlyTiles tiles_;
  ThreadPool pool_;  // the worker's: the other one has one caller at a time
  int64_t gradient_size_;
  int64_t elements_ = 0, elements_early_ = 0, bytes_early_ = 0;
  std::vector<GradientRange> parts_;  // sorted by address
  const std::vector<char> all_touched_;
  Input input_{};
  update::UpdateInput update_input_{};
  state::ShardedState::Updated updated_;
  std::vector<std::size_t> order_;  // groups, in the order in which their gradients become final

  mutable Mutex mutex_;
  ConditionVariable changed_;
  std::array<double, 3> seconds_ ZR_GUARDED_BY(mutex_) = {};  // by Work
  std::vector<UpdateGroup> groups_;  // `missing` is guarded; the rest belongs to the thread that updates it
  std::vector<std::size_t> ready_ ZR_GUARDED_BY(mutex_);  // groups whose gradients are final, in that order
  std::size_t taken_ ZR_GUARDED_BY(mutex_) = 0;           // number of these that the worker has taken
  std::function<bool(uint32_t)> touches_ ZR_GUARDED_BY(mutex_);
  std::function<void()> task_ ZR_GUARDED_BY(mutex_);     // for the worker, between steps; empty: none
  bool is_active_ ZR_GUARDED_BY(mutex_) = false;         // between begin() and finish()
  bool is_reading_ahead_ ZR_GUARDED_BY(mutex_) = false;  // the worker reads ahead
  bool is_busy_ ZR_GUARDED_BY(mutex_) = false;           // the worker updates a group
  bool is_stopped_ ZR_GUARDED_BY(mutex_) = false;        // a gradient is not finite, or the worker failed
  bool is_recorded_ ZR_GUARDED_BY(mutex_) = false;       // the first step is over
  bool was_used_late_ ZR_GUARDED_BY(mutex_) = false;  // a collective used gradients more often than in the first step
  int64_t last_use_ ZR_GUARDED_BY(mutex_) = 0;
  std::vector<Uses> uses_ ZR_GUARDED_BY(mutex_);                   // of each part, by blocks of the size of norm blocks
  std::optional<Trace::Time> blocks_since_ ZR_GUARDED_BY(mutex_);  // since then the training thread waits in finish()
  offload::TierWaits blocked_ ZR_GUARDED_BY(mutex_);               // waits for the tier in that time
  bool ends_ ZR_GUARDED_BY(mutex_) = false;
  int64_t parts_updated_ ZR_GUARDED_BY(mutex_) = 0;
  std::exception_ptr failure_ ZR_GUARDED_BY(mutex_);
  std::thread worker_;  // last: uses the above
};

}  // namespace zr::host::engine
