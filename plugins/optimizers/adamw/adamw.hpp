// AdamW without the library around it: D is the class that the library exports.
#pragma once

#include "hyperparameters.hpp"

template <class D>
class AdamWOptimizer : public zr::Optimizer<D> {
 public:
  static constexpr const char* description = "Adam with decoupled weight decay";
  static constexpr const char* license = "Apache-2.0";
  using H = AdamWHyperparameters;
  static constexpr zr_key keys[] = {H::kBeta1, H::kBeta2, H::kEps, H::kWeightDecay};
  static constexpr zr_slot slots[] = {zr::slot("exp_avg"), zr::slot("exp_avg_sq")};
  static constexpr bool rounds = true;
  static constexpr bool ignores_norm = true;  // update() does not read Update::job.grad_norm

  explicit AdamWOptimizer(const zr::Config& config) : hyperparameters_(config), kernel_(ZR_CHOOSE(adamw)) {}

  void update(const zr::Update& u) const {
    kernel_(hyperparameters_.constants(u.mul, u.step, u.lr),
            {u.weight, u.grad, u.slot(0), u.slot(1), u.count, u.out, u.out_dtype, u.streams});
  }

 protected:
  AdamWHyperparameters hyperparameters_;

 private:
  decltype(ZR_CHOOSE(adamw)) kernel_;
};
