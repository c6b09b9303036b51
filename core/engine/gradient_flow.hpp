// Gradients from autograd to the strategy: each is written to its destination when it arrives; zeros replace missing
// ones after backward.
#pragma once

#include <vector>

#include "engine/step_context.hpp"
#include "offload/disk_backed_buffers.hpp"

namespace zr::host::engine {

/// Training thread, except arrived(). Receives the model's gradients while the object exists.
class GradientFlow {
 public:
  /// Both arguments outlive the flow. With gradients.overlap = false no gradient reaches the strategy before backward
  /// has ended. disk_buffers: buffers on a disk tier, which cannot be a gradient's destination; null: none.
  GradientFlow(const StepContext& context, const offload::DiskBackedBuffers* disk_buffers);
  ~GradientFlow();
  GradientFlow(const GradientFlow&) = delete;

  /// Sets the number of micro-steps of the steps that follow. Call it between steps.
  void set_accumulation(int accumulation) { last_ = static_cast<uint32_t>(accumulation) - 1; }
  /// Begins a micro-step; 0 is the first of a step. `counts` false: gradients are received, but zeros replace them.
  void begin(uint32_t micro, bool counts);
  /// Call if an exception ended the micro-step's backward. If the strategy has received no gradient yet, undoes the
  /// micro-step and returns true; otherwise returns false.
  bool cancel();
  /// Call when autograd has computed this parameter's gradient. [use], any thread.
  void arrived(uint32_t param);
  /// From the next step on, checks gradients for non-finite elements as they are handed over, which reads them once
  /// more.
  void watch(bool on) { watches_next_ = on; }
  /// If watched: the first parameter, in the model's order, for which this rank handed over a non-finite element in
  /// this step; -1: none.
  int64_t first_non_finite() const { return first_non_finite_; }
  /// Ends the micro-step: writes zeros for missing gradients, then sends ZR_BACKWARD_END to the strategy.
  void end();
  /// By parameter: not 0 if a micro-batch of this step had a gradient for it on this rank.
  const std::vector<char>& touched() const { return touched_; }
  /// Number of collectives of all backwards so far; and how many of these were submitted before the last gradient of
  /// their backward arrived.
  int64_t collectives() const { return collectives_; }
  int64_t collectives_early() const { return collectives_early_; }

 private:
  bool deliver(uint32_t param);
  void write(uint32_t param, int64_t first, const zr_view& dst);
  void deliver_waiting();
  void event(uint32_t kind);
  uint32_t seen_micro() const { return hold_ ? 0 : micro_; }  // the micro-step that the strategy sees

  const StepContext& context_;
  model::Model& model_;
  const plugin::Instance& strategy_;
  const zr_strategy_api* api_;
  const plan::MemoryPlan& plan_;
  const comm::CommRuntime& comm_;
  const offload::DiskBackedBuffers* disk_buffers_;
  bool overlap_;
  bool hold_;      // gradients accumulate in their destinations until the last micro-step of a step
  uint32_t last_;  // index of the last micro-step of a step
  uint32_t micro_ = 0;
  bool active_ = false, counts_ = true;
  bool step_begun_ = false;  // ZR_STEP_BEGIN was sent, and no micro-step has ended since
  bool watches_next_ = false, watches_ = false;
  int64_t first_non_finite_ = -1;
  std::vector<int64_t> taken_;  // by parameter: elements handed to the strategy in this micro-step
  std::vector<char> present_;   // by parameter: autograd delivered in this micro-step
  std::vector<char> touched_;
  std::vector<uint32_t> waiting_;                         // arrived, but the strategy has no free bucket slot yet
  int64_t submitted_before_ = 0, submitted_at_last_ = 0;  // submitted collectives: at begin(), at the last arrival
  int64_t collectives_ = 0, collectives_early_ = 0;
};

}  // namespace zr::host::engine
