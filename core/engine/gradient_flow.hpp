// From autograd to the strategy: each gradient is placed into a bucket as it appears, missing ones as zeros at the end.
#pragma once

#include <vector>

#include "engine/step_context.hpp"
#include "offload/disk_backed_buffers.hpp"

namespace zr::host {

/// Training thread, except arrived(). Receives the model's gradients from its construction to its end.
class GradientFlow {
 public:
  /// All references outlive the flow. With gradients.overlap = false nothing leaves before the backward has ended.
  /// pages: where no gradient can be placed; or null.
  GradientFlow(const StepContext& context, const DiskBackedBuffers* pages);
  ~GradientFlow();
  GradientFlow(const GradientFlow&) = delete;

  /// A micro-step begins; 0 is the first of a step. `counts` false: its gradients are received, but zeros take their
  /// place.
  void begin(uint32_t micro, bool counts);
  /// An exception ended the micro-step's backward. True if no gradient had been handed to the strategy: then it is as
  /// if the micro-step had not begun.
  bool cancel();
  /// Autograd has this parameter's gradient. [use], any thread.
  void arrived(uint32_t param);
  /// From the next step on, looks whether what is handed over is finite, which costs a reading of it.
  void watch(bool on) { watches_next_ = on; }
  /// If watched: the first parameter, in the model's order, of which this rank handed over an element in this step that
  /// is not finite; -1: none.
  int64_t first_non_finite() const { return first_non_finite_; }
  /// The backward has ended: zeros for what did not come, then the strategy's BACKWARD_END.
  void end();
  /// By parameter: some micro-batch of this step had a gradient for it, on this rank.
  const std::vector<char>& touched() const { return touched_; }
  /// Collectives of all backwards so far, and those among them that had been submitted before the last gradient of
  /// theirs arrived.
  int64_t collectives() const { return collectives_; }
  int64_t collectives_early() const { return collectives_early_; }

 private:
  bool deliver(uint32_t param);
  void write(uint32_t param, int64_t first, const zr_view& dst);
  void deliver_waiting();
  void event(uint32_t kind);
  uint32_t seen_micro() const { return hold_ ? 0 : micro_; }  // by the strategy

  const StepContext& context_;
  Model& model_;
  const Instance& strategy_;
  const zr_strategy_api* api_;
  const MemoryPlan& plan_;
  const CommRuntime& comm_;
  const DiskBackedBuffers* disk_buffers_;
  bool overlap_;
  bool hold_;      // gradients stay in their places until the last micro-step of a step
  uint32_t last_;  // that micro-step
  uint32_t micro_ = 0;
  bool active_ = false, counts_ = true;
  bool step_begun_ = false;  // the strategy was told so, and no micro-step has ended since
  bool watches_next_ = false, watches_ = false;
  int64_t first_non_finite_ = -1;
  std::vector<int64_t> taken_;  // by parameter: elements handed to the strategy in this micro-step
  std::vector<char> present_;   // by parameter: autograd delivered in this micro-step
  std::vector<char> touched_;
  std::vector<uint32_t> waiting_;                         // delivered, no room yet
  int64_t submitted_before_ = 0, submitted_at_last_ = 0;  // the communicator's count: at begin(), at the last arrival
  int64_t collectives_ = 0, collectives_early_ = 0;
};

}  // namespace zr::host
