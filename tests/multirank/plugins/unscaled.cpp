// SGD with the settings of the parity tests, whose gradients may lack the division by the loss scale: shows that an
// fp16 case of the parity matrix can fail.
#include "zr/optimizer.hpp"

namespace {

struct Unscaled : zr::Optimizer<Unscaled> {
  static constexpr zr_key keys[] = {
      zr::key_float("missed", "1", 1, zr::kNoBound, "the factor that the division by the loss scale omits")};
  static constexpr zr_slot slots[] = {zr::slot("momentum_buffer")};
  explicit Unscaled(const zr::Config& config) : missed(static_cast<float>(config.number("missed"))) {}
  void update(const zr::Update& u) const {
    const float rate = static_cast<float>(u.lr), mul = u.mul * missed;
    float* buffer = u.slot(0);
    for (int64_t i = 0; i < u.count; ++i) {
      float g = u.grad[i] * mul;
      const float pulled = u.weight[i] * 0.1f;
      g = g + pulled;
      const float kept = buffer[i] * 0.9f;
      buffer[i] = u.step == 1 ? g : kept + g;
      const float ahead = buffer[i] * 0.9f;
      const float move = (g + ahead) * rate;
      u.weight[i] = u.weight[i] - move;
    }
  }
  float missed;
};

}  // namespace

ZR_OPTIMIZER(Unscaled, "unscaled", "tests", "1.0.0");
