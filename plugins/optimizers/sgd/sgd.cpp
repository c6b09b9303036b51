// SGD: gradient descent with momentum, dampening, Nesterov momentum and weight decay, as in torch::optim::SGD.
#include "sgd.hpp"

namespace {
class Sgd : public SgdOptimizer<Sgd> {
 public:
  using SgdOptimizer::SgdOptimizer;
};
}  // namespace

ZR_OPTIMIZER(Sgd, "sgd", "zeroth", "0.1.0");
