// The hyperparameters of AdamW, for the optimizers that use its formula.
#pragma once

#include <cmath>

#include "kernel.hpp"
#include "zr/optimizer.hpp"

struct AdamWHyperparameters {
  double beta1, beta2, eps, weight_decay;

  static constexpr double kBelowOne = 1 - 0x1p-53;
  static constexpr zr_key kBeta1 =
      zr::per_group(zr::key_float("beta1", "0.9", 0, kBelowOne, "decay per update of the running mean of gradients"));
  static constexpr zr_key kBeta2 = zr::per_group(
      zr::key_float("beta2", "0.999", 0, kBelowOne, "decay per update of the running mean of squared gradients"));
  static constexpr zr_key kEps =
      zr::per_group(zr::key_float("eps", "1e-8", 0, 1, "added to the square root in the denominator"));
  static constexpr zr_key kWeightDecay =
      zr::per_group(zr::key_float("weight_decay", "0.01", 0, zr::kNoBound,
                                  "decoupled weight decay: an update multiplies the weight by 1 - lr x weight_decay"));

  explicit AdamWHyperparameters(const zr::Config& config)
      : beta1(config.number("beta1")),
        beta2(config.number("beta2")),
        eps(config.number("eps")),
        weight_decay(config.number("weight_decay")) {}

  /// docs/numerics.md, section 9, has the formula. mul: factor of the reduced gradient; step: of the parameter.
  AdamWConstants constants(float mul, int64_t parameter_step, double lr) const {
    return constants(mul, parameter_step, parameter_step, lr);
  }
  /// second_updates: the number of updates that exp_avg_sq contains; 0: its values are not those of updates, and have
  /// no bias.
  AdamWConstants constants(float mul, int64_t parameter_step, int64_t second_updates, double lr) const {
    const double step = static_cast<double>(parameter_step);
    const double correction =
        second_updates > 0 ? std::sqrt(1 - std::pow(beta2, static_cast<double>(second_updates))) : 1.0;
    AdamWConstants c;
    c.mul = mul;
    c.decay = static_cast<float>(1 - lr * weight_decay);
    c.beta1 = static_cast<float>(beta1);
    c.gain1 = static_cast<float>(1 - beta1);
    c.beta2 = static_cast<float>(beta2);
    c.gain2 = static_cast<float>(1 - beta2);
    c.rate = static_cast<float>(lr * correction / (1 - std::pow(beta1, step)));
    c.eps = static_cast<float>(eps * correction);
    return c;
  }
};
