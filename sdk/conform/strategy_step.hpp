// The calls of a training step to a strategy, in the engine's order: for conformance, and for `zeroth plan --hosts`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "zr/abi/strategy.h"

namespace zr::conform {

/// What a step needs to know of the job.
struct StepShape {
  struct Parameter {
    int64_t count = 0;
    bool frozen = false;
    uint32_t part = 0;  // the instance of the strategy that serves it
  };
  std::vector<Parameter> params{};
  uint32_t parts = 1;
  int accumulation = 1;          // micro-steps
  bool holds = false;            // ZR_PLAN_HOLD_GRADS
  bool has_local_grads = false;  // ZR_USE_LOCAL_GRADS: no gradient is delivered
};

/// A step of one rank, without tensors. A derived class makes each call, with the memory and the checks that it needs,
/// and throws if the call fails. Thread rules as in zr/abi/strategy.h.
class StrategyStep {
 public:
  StrategyStep(const StrategyStep&) = delete;

 protected:
  explicit StrategyStep(StepShape shape) : shape_(std::move(shape)) {}
  ~StrategyStep() = default;

  /// Forward and backward of all micro-steps, from the first forward to grads_finish().
  void reduce_gradients();
  /// The micro-step in which a call is made, and whether it is the last one.
  int micro() const { return micro_; }
  bool is_last_micro() const { return micro_ + 1 == shape_.accumulation; }
  /// What grads_finish() gets, and updated() and ZR_STEP_END of this step.
  zr_use update_use() const { return use_of(ZR_UPDATE_PHASE); }

  /// acquire() and release() of weights during forward or backward.
  virtual void use_weights(const zr_use& use) = 0;
  /// All trainable parameters of a part, in the order in which backward computes their gradients.
  virtual std::vector<uint32_t> gradient_order(uint32_t part) const;
  /// Calls grad_destination(); returns ZR_OK or ZR_AGAIN.
  virtual zr_code grad_destination(uint32_t param, int64_t* first, const zr_use& use, zr_view* dst) = 0;
  /// The gradient's elements from `first` on are written to dst.
  virtual void write_gradient(uint32_t param, int64_t first, const zr_view& dst);
  virtual void grad_ready(uint32_t param, int64_t first, int64_t count, const zr_use& use) = 0;
  virtual void step_begin(const zr_use& use) = 0;
  virtual void backward_end(uint32_t part, const zr_use& use) = 0;
  virtual void grads_finish(const zr_use& use) = 0;
  /// The parameter in messages.
  virtual std::string text_of(uint32_t param) const = 0;
  /// Throws: grad_destination() did this.
  [[noreturn]] virtual void fail_destination(const std::string& problem) const = 0;

 private:
  zr_use use_of(uint32_t phase) const;
  void deliver_part(uint32_t part, const zr_use& use);
  // False if the strategy has no memory for the rest of the gradient until others are complete.
  bool deliver(uint32_t param, const zr_use& use);
  void deliver_pending(const zr_use& use);

  const StepShape shape_;
  int micro_ = 0;
  std::vector<int64_t> delivered_;  // elements, by parameter
  std::vector<uint32_t> pending_;   // parameters for whose gradients the strategy had no memory
};

}  // namespace zr::conform
