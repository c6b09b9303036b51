// AdamW with 8-bit states without the library around it: D is the class that the library exports.
#pragma once

#include "../adamw/hyperparameters.hpp"
#include "kernel.hpp"
#include "zr/abi/draft/optimizer_shapes.h"

template <class D>
class AdamW8BitOptimizer : public zr::Optimizer<D> {
 public:
  static constexpr const char* description = "AdamW with states of 8 bits";
  static constexpr const char* license = "Apache-2.0";
  using H = AdamWHyperparameters;
  static constexpr zr_key keys[] = {
      H::kBeta1,
      H::kBeta2,
      H::kEps,
      H::kWeightDecay,
      zr::per_group(zr::key_int("min_8bit_elements", "4096", 0, 1e15,
                                "parameters with fewer elements have fp32 states; large: all parameters of the group")),
  };
  static constexpr bool rounds = true;

  explicit AdamW8BitOptimizer(const zr::Config& config)
      : hyperparameters_(config),
        min_elements_(config.integer("min_8bit_elements")),
        eight_bit_(ZR_CHOOSE(adamw8)),
        fp32_(ZR_CHOOSE(adamw)) {}

  void describe(const zr_param& param, zr::Description& description) const {
    if (param.count < min_elements_) {
      description.slots = {zr::slot("exp_avg"), zr::slot("exp_avg_sq")};
      return;
    }
    const auto scale = [](const char* name) { return zr_slot{name, ZR_F32, ZR_SLOT_PER_BLOCK, 0, kStateBlock}; };
    description.slots = {zr::slot("exp_avg", ZR_U8), zr::slot("exp_avg_sq", ZR_U8), scale("exp_avg_scale"),
                         scale("exp_avg_sq_scale")};
  }

  void update(const zr::Update& u) const {
    const AdamWConstants c = hyperparameters_.constants(u.mul, u.step, u.lr);
    if (!has_8bit_states(u.slice))
      return fp32_(c, {u.weight, u.grad, u.slot(0), u.slot(1), u.count, u.out, u.out_dtype, u.streams});
    eight_bit_(c, {u.weight, u.grad, u.state<uint8_t>(0), u.state<uint8_t>(1), u.state<float>(2), u.state<float>(3),
                   u.count, u.out, u.out_dtype});
  }

 protected:
  static bool has_8bit_states(const zr_update_slice& slice) { return slice.slots[0].dtype == ZR_U8; }
  AdamWHyperparameters hyperparameters_;

 private:
  int64_t min_elements_;
  decltype(ZR_CHOOSE(adamw8)) eight_bit_;
  decltype(ZR_CHOOSE(adamw)) fp32_;
};
