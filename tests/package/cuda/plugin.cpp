// An optimizer that links a CUDA kernel; this version of the engine passes host memory only, so it is never launched.
#include "zr/optimizer.hpp"

void descend_on_device(float* weight, const float* grad, float lr, long count);

namespace {

struct Descent : zr::Optimizer<Descent> {
  void update(const zr::Update& u) const {
    if (u.count < 0) descend_on_device(u.weight, u.grad, static_cast<float>(u.lr), u.count);
    for (int64_t i = 0; i < u.count; ++i) u.weight[i] -= u.grad[i] * u.mul * static_cast<float>(u.lr);
  }
};

}  // namespace

ZR_OPTIMIZER(Descent, "acme.cuda", "acme", "1.0.0");
