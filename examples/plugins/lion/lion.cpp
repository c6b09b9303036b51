// Lion (Chen et al. 2023, arXiv:2302.06675): each weight moves by the sign of an interpolated momentum.
#include "zr/optimizer.hpp"

namespace {

struct Lion : zr::Optimizer<Lion> {
  static constexpr zr_key keys[] = {
      zr::key_float("beta1", "0.9", 0, 1, "weight of the momentum in the update"),
      zr::key_float("beta2", "0.99", 0, 1, "weight of the previous momentum in the next one"),
      zr::per_group(zr::key_float("weight_decay", "0", 0, zr::kNoBound, "decoupled weight decay"))};
  static constexpr zr_slot slots[] = {zr::slot("exp_avg")};

  explicit Lion(const zr::Config& config)
      : beta1(config.number("beta1")), beta2(config.number("beta2")), weight_decay(config.number("weight_decay")) {}

  void update(const zr::Update& u) const {
    const float decay = float(1 - u.lr * weight_decay), lr = float(u.lr), keep1 = float(beta1), keep2 = float(beta2),
                add1 = float(1 - beta1), add2 = float(1 - beta2);
    float* momentum = u.slot(0);
    for (int64_t i = 0; i < u.count; ++i) {
      const float grad = u.grad[i] * u.mul;
      const float direction = momentum[i] * keep1 + grad * add1;
      const float sign = float(direction > 0) - float(direction < 0);
      u.weight[i] = u.weight[i] * decay - sign * lr;
      momentum[i] = momentum[i] * keep2 + grad * add2;
    }
  }

  double beta1, beta2, weight_decay;
};

}  // namespace

ZR_OPTIMIZER(Lion, "lion", "example", "1.0.0");
