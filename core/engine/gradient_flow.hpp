// Gradients from autograd to the strategy: each is written to its destination when it arrives; zeros replace missing
// ones after backward.
#pragma once

#include <atomic>
#include <vector>

#include "engine/local_gradients.hpp"
#include "job/step_context.hpp"
#include "offload/disk_backed_buffers.hpp"

namespace zr::host::engine {

/// Training thread, except arrived(). Receives the model's gradients while the object exists.
class GradientFlow {
 public:
  /// All arguments outlive the flow. With gradients.overlap = false no gradient reaches the strategy before backward
  /// has ended. disk_buffers: buffers on a disk tier, which cannot be a gradient's destination; null: none.
  GradientFlow(const job::StepContext& context, const offload::DiskBackedBuffers* disk_buffers);
  ~GradientFlow();
  GradientFlow(const GradientFlow&) = delete;

  /// Sets the number of micro-steps of the steps that follow. Call it between steps.
  void set_accumulation(int accumulation) { last_micro_ = static_cast<uint32_t>(accumulation) - 1; }
  /// Begins a micro-step; 0 is the first of a step. `contributes` false: gradients are received, but zeros replace
  /// them. local: where they are added up in a step that does not reduce them; null: where the strategy says.
  void begin(uint32_t micro, bool contributes, LocalGradients* local = nullptr);
  /// Call if an exception ended the micro-step's backward. If the strategy has received no gradient yet, undoes the
  /// micro-step and returns true; otherwise returns false.
  bool cancel();
  /// Call when autograd has computed this parameter's gradient. [use], any thread.
  void arrived(uint32_t param);
  /// From the next step on, checks gradients for non-finite elements as they are handed over, which reads them once
  /// more.
  void check_non_finite(bool on) { checks_next_step_ = on; }
  /// If checked: the first parameter, in the model's order, for which this rank handed over a non-finite element in
  /// this step; -1: none.
  int64_t first_non_finite() const { return first_non_finite_; }
  /// Ends the micro-step: writes zeros for missing gradients, then sends ZR_BACKWARD_END to the strategy.
  void end();
  /// By parameter: not 0 if a micro-batch of this step had a gradient for it on this rank.
  const std::vector<char>& touched() const { return touched_; }
  /// Whether the micro-step in progress, or the last one, has a gradient for the parameter on this rank. Call it when
  /// the parameter's reduced gradients are final, by any thread.
  bool receives(uint32_t param) const ZR_NO_THREAD_SAFETY_ANALYSIS {  // neither changes before the next micro-step
    return contributes_ && has_gradient_[param];
  }
  /// Number of collectives of all backwards so far; and how many of these were submitted before the last gradient of
  /// their backward arrived.
  int64_t collectives() const { return collectives_; }
  int64_t collectives_early() const { return collectives_early_; }

 private:
  void set_in_backward(bool running);
  void check_in_backward(uint32_t param) const;
  bool is_local() const { return local_ != nullptr; }
  bool deliver(uint32_t param) ZR_REQUIRES(context_.use);
  void deliver_local(uint32_t param) ZR_REQUIRES(context_.use);
  void copy_or_add(uint32_t param, int64_t first, const zr_view& dst) ZR_REQUIRES(context_.use);
  void clear(const zr_view& gradients) const;
  int64_t count_non_finite(const zr_view& gradients) const;
  void deliver_pending() ZR_REQUIRES(context_.use);
  void end_part(uint32_t part) ZR_REQUIRES(context_.use);
  void report_event(uint32_t kind) ZR_REQUIRES(context_.use);
  // The micro-step is 0 if the strategy gets only the sum over the micro-steps.
  zr_use strategy_use() const ZR_REQUIRES(context_.use) {
    return context_.use_of(
        ZR_BACKWARD, accumulates_locally_ ? 0 : micro_,
        (micro_ == last_micro_ ? uint32_t{ZR_USE_LAST_MICRO} : 0) | (is_local() ? uint32_t{ZR_USE_LOCAL_GRADS} : 0));
  }

  const job::StepContext& context_;
  model::GradientSource& source_;
  const job::StrategyParts& strategy_;
  const plan::MemoryPlan& plan_;
  const comm::CommRuntime& comm_;
  const offload::DiskBackedBuffers* disk_buffers_;
  LocalGradients* local_ = nullptr;  // of the micro-step
  bool overlap_;
  bool accumulates_locally_;  // gradients accumulate in their destinations until the last micro-step of a step
  uint32_t last_micro_;       // index of the last micro-step of a step
  uint32_t micro_ ZR_GUARDED_BY(context_.use) = 0;
  // Autograd's threads use them too. computed_: autograd computed a gradient of this backward on a device.
  std::atomic<bool> in_backward_ = false, computed_ = false;
  bool contributes_ ZR_GUARDED_BY(context_.use) = true;  // false: zeros replace the gradients of this micro-step
  bool step_begun_ ZR_GUARDED_BY(context_.use) = false;  // ZR_STEP_BEGIN was sent, and no micro-step has ended since
  bool checks_next_step_ = false, checks_non_finite_ ZR_GUARDED_BY(context_.use) = false;
  int64_t first_non_finite_ = -1;
  std::vector<int64_t> delivered_elements_
      ZR_GUARDED_BY(context_.use);  // by parameter: handed to the strategy in this micro-step
  std::vector<char> has_gradient_ ZR_GUARDED_BY(context_.use);  // by parameter: autograd delivered in this micro-step
  std::vector<char> touched_;
  std::vector<uint32_t> pending_ ZR_GUARDED_BY(context_.use);  // arrived, but the strategy has no free bucket slot yet
  // The part whose gradients may be handed over. Those of part 1 wait until part 0 has issued all its collectives, so
  // that all ranks issue them in one order, even if gradients arrive in another order on each.
  uint32_t part_ ZR_GUARDED_BY(context_.use) = 0;
  int64_t submitted_before_ ZR_GUARDED_BY(context_.use) = 0,
                            submitted_at_last_
                            ZR_GUARDED_BY(context_.use) = 0;  // submitted collectives: at begin(), at the last arrival
  int64_t collectives_ = 0, collectives_early_ = 0;
};

}  // namespace zr::host::engine
