// Compares twenty steps of the optimizer plug-ins with twenty steps of the libtorch classes of the same name.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "contract/optimizer_problem.hpp"

namespace zr::testing {
namespace {

/// The largest difference after 20 steps, relative to the largest weight.
template <class Torch, class Options>
double difference(const std::string& id, const Values& values, const Options& options) {
  const OptimizerUnderTest ours(kPlugins, id, values);
  Problem p(50021, ours.describe().n_slots);
  p.grad_mul = 1;
  torch::Tensor weight = torch::from_blob(p.weight.data(), {p.count}).clone().requires_grad_();
  Torch theirs({weight}, options);
  for (p.step = 1; p.step <= 20; ++p.step) {
    weight.mutable_grad() = torch::from_blob(p.grad.data(), {p.count}).clone();
    theirs.step();
    p.run(ours);
    p.new_gradient();
  }
  const torch::Tensor mine = torch::from_blob(p.weight.data(), {p.count});
  return ((mine - weight.detach()).abs().max() / weight.detach().abs().max()).template item<double>();
}

TEST(AdamWTest, MatchesLibtorchForTwentySteps) {
  const double lr = 3e-3;
  EXPECT_LT((difference<torch::optim::AdamW>("adamw", {}, torch::optim::AdamWOptions(lr).weight_decay(0.01))), 1e-6);
  EXPECT_LT(
      (difference<torch::optim::AdamW>("adamw", {{"beta1", 0.8}, {"beta2", 0.95}, {"eps", 1e-6}, {"weight_decay", 0.3}},
                                       torch::optim::AdamWOptions(lr).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.3))),
      1e-6);
}

TEST(SgdTest, MatchesLibtorchForTwentySteps) {
  using Options = torch::optim::SGDOptions;
  const double lr = 3e-3;
  EXPECT_LT((difference<torch::optim::SGD>("sgd", {}, Options(lr))), 1e-6);
  EXPECT_LT((difference<torch::optim::SGD>("sgd", {{"momentum", 0.9}, {"weight_decay", 0.01}},
                                           Options(lr).momentum(0.9).weight_decay(0.01))),
            1e-6);
  EXPECT_LT((difference<torch::optim::SGD>("sgd", {{"momentum", 0.9}, {"dampening", 0.5}},
                                           Options(lr).momentum(0.9).dampening(0.5))),
            1e-6);
  EXPECT_LT((difference<torch::optim::SGD>("sgd", {{"momentum", 0.9}, {"nesterov", 1}},
                                           Options(lr).momentum(0.9).nesterov(true))),
            1e-6);
}

}  // namespace
}  // namespace zr::testing
