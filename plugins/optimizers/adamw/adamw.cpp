// AdamW: adaptive moments with bias correction and decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).
#include <cmath>

#include "kernel.hpp"
#include "zr/optimizer.hpp"

namespace {

constexpr double kBelowOne = 1 - 0x1p-53;

class AdamW : public zr::Optimizer<AdamW> {
 public:
  static constexpr zr_key keys[] = {
      zr::per_group(zr::key_float("beta1", "0.9", 0, kBelowOne, "decay per update of the running mean of gradients")),
      zr::per_group(
          zr::key_float("beta2", "0.999", 0, kBelowOne, "decay per update of the running mean of squared gradients")),
      zr::per_group(zr::key_float("eps", "1e-8", 0, 1, "added to the square root in the denominator")),
      zr::per_group(zr::key_float("weight_decay", "0.01", 0, zr::kNoBound,
                                  "decoupled weight decay: an update multiplies the weight by 1 - lr x weight_decay")),
  };
  static constexpr zr_slot slots[] = {zr::slot("exp_avg"), zr::slot("exp_avg_sq")};
  static constexpr bool rounds = true;

  explicit AdamW(const zr::Config& config)
      : beta1_(config.number("beta1")),
        beta2_(config.number("beta2")),
        eps_(config.number("eps")),
        weight_decay_(config.number("weight_decay")),
        kernel_(ZR_CHOOSE(adamw)) {}

  void update(const zr::Update& u) const {
    const double step = static_cast<double>(u.step);
    const double correction = std::sqrt(1 - std::pow(beta2_, step));
    AdamWConstants c;
    c.mul = u.mul;
    c.decay = static_cast<float>(1 - u.lr * weight_decay_);
    c.beta1 = static_cast<float>(beta1_);
    c.gain1 = static_cast<float>(1 - beta1_);
    c.beta2 = static_cast<float>(beta2_);
    c.gain2 = static_cast<float>(1 - beta2_);
    c.rate = static_cast<float>(u.lr * correction / (1 - std::pow(beta1_, step)));
    c.eps = static_cast<float>(eps_ * correction);
    kernel_(c, {u.weight, u.grad, u.slot(0), u.slot(1), u.count, u.out, u.out_dtype, u.streams});
  }

 private:
  double beta1_, beta2_, eps_, weight_decay_;
  decltype(ZR_CHOOSE(adamw)) kernel_;
};

}  // namespace

ZR_OPTIMIZER(AdamW, "adamw", "zeroth", "0.1.0");
