// AdamW: adaptive moments with bias correction and decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).
#include "hyperparameters.hpp"

namespace {

class AdamW : public zr::Optimizer<AdamW> {
 public:
  static constexpr const char* description = "Adam with decoupled weight decay";
  static constexpr const char* license = "Apache-2.0";
  using H = AdamWHyperparameters;
  static constexpr zr_key keys[] = {H::kBeta1, H::kBeta2, H::kEps, H::kWeightDecay};
  static constexpr zr_slot slots[] = {zr::slot("exp_avg"), zr::slot("exp_avg_sq")};
  static constexpr bool rounds = true;
  static constexpr bool ignores_norm = true;  // update() does not read Update::job.grad_norm

  explicit AdamW(const zr::Config& config) : hyperparameters_(config), kernel_(ZR_CHOOSE(adamw)) {}

  void update(const zr::Update& u) const {
    kernel_(hyperparameters_.constants(u),
            {u.weight, u.grad, u.slot(0), u.slot(1), u.count, u.out, u.out_dtype, u.streams});
  }

 private:
  AdamWHyperparameters hyperparameters_;
  decltype(ZR_CHOOSE(adamw)) kernel_;
};

}  // namespace

ZR_OPTIMIZER(AdamW, "adamw", "zeroth", "0.1.0");
