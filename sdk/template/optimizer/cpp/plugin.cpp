// The optimizer "@ID@": gradient descent with momentum. For a gradient g, momentum buffer b, weight w and learning rate
// lr, in fp32 and in this order (each product and sum is rounded once):
//
//   b <- b momentum + g     (at the first update: b <- g)
//   w <- w - b lr
#include "zr/optimizer.hpp"

namespace {

struct Plugin : zr::Optimizer<Plugin> {
  static constexpr const char* description = "gradient descent with momentum";
  static constexpr zr_key keys[] = {
      zr::per_group(zr::key_float("momentum", "0.9", 0, 1, "fraction of the previous update that is kept"))};
  static constexpr zr_slot slots[] = {zr::slot("momentum_buffer")};

  explicit Plugin(const zr::Config& config) : momentum_(static_cast<float>(config.number("momentum"))) {}

  void update(const zr::Update& u) const {
    float* buffer = u.slot(0);
    const float lr = static_cast<float>(u.lr);
    for (int64_t i = 0; i < u.count; ++i) {
      const float grad = u.grad[i] * u.mul;
      buffer[i] = u.step == 1 ? grad : buffer[i] * momentum_ + grad;
      u.weight[i] -= buffer[i] * lr;
    }
  }

 private:
  float momentum_;
};

}  // namespace

ZR_OPTIMIZER(Plugin, "@ID@", "@VENDOR@", "0.1.0");
