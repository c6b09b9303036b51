// The two kinds of training steps: the strategy reduces the gradients over ranks, or they stay on their ranks and the
// optimizer exchanges something else (local_gradients).
#pragma once

#include <cstdint>

#include "engine/local_gradients.hpp"
#include "engine/optimizer_update.hpp"
#include "engine/step_sync.hpp"

namespace zr::host::engine {

/// What differs between the kinds; chosen once per step, on all ranks alike. Training thread only.
class StepKind {
 public:
  virtual ~StepKind() = default;
  /// The flags of the strategy's calls in such a step: ZR_USE_LOCAL_GRADS, or 0.
  virtual uint32_t use_flags() const = 0;
  /// Whether updates may begin during backward.
  virtual bool may_begin_early() const = 0;
  /// Where backward adds up this rank's gradients; null: where the strategy says.
  virtual LocalGradients* destination() const = 0;
  /// The factor of the step's gradients, apart from their divisor. clipping: the factor that the norm demands.
  virtual double factor(double clipping) const = 0;
  /// Adds what only this kind counts to this rank's statistics.
  virtual void add_to(StepSync::LocalStats& own) const = 0;
  /// Updates this rank's masters, states and weights. Collective.
  virtual void update(const OptimizerUpdate::Input& input) = 0;
  /// Call after update number `number`. Collective.
  virtual void updated(int64_t number) = 0;
  bool is_local() const { return destination() != nullptr; }
};

/// A step whose gradients are reduced.
class ReducedStep final : public StepKind {
 public:
  /// All outlive the object. local: the optimizer's functions for local gradients, which may want sums of its states.
  ReducedStep(OptimizerUpdate& update, LocalGradients& local, StepSync& sync)
      : update_(update), local_(local), sync_(sync) {}
  uint32_t use_flags() const override { return 0; }
  bool may_begin_early() const override { return true; }
  LocalGradients* destination() const override { return nullptr; }
  double factor(double clipping) const override { return clipping; }
  void add_to(StepSync::LocalStats&) const override {}
  void update(const OptimizerUpdate::Input& input) override { update_.run(input); }
  void updated(int64_t number) override { local_.pass_state_sum(number, sync_.norm()); }

 private:
  OptimizerUpdate& update_;
  LocalGradients& local_;
  StepSync& sync_;
};

/// A step whose gradients stay on their ranks. They are not clipped.
class LocalStep final : public StepKind {
 public:
  /// Both outlive the object; `update` has the learning rates.
  LocalStep(LocalGradients& local, const OptimizerUpdate& update, int world)
      : local_(local), update_(update), world_(world) {}
  uint32_t use_flags() const override { return ZR_USE_LOCAL_GRADS; }
  bool may_begin_early() const override { return false; }
  LocalGradients* destination() const override { return &local_; }
  double factor(double) const override { return world_; }
  void add_to(StepSync::LocalStats& own) const override {
    const LocalGradients::NonFinite found = local_.non_finite();
    own.local_non_finite = found.elements;
    own.first_non_finite = found.first_param;
  }
  void update(const OptimizerUpdate::Input& input) override {
    local_.update({input.grad_mul, input.number, input.steps, update_.rates(input.rate), input.touched});
  }
  void updated(int64_t) override {}

 private:
  LocalGradients& local_;
  const OptimizerUpdate& update_;
  const int world_;
};

}  // namespace zr::host::engine
