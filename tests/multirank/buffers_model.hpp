// A small model whose loss depends on its buffers: batch statistics, and a running level that forward subtracts.
#pragma once

#include <torch/torch.h>

#include "multirank/parity/features.hpp"

namespace buffers_tests {

struct Running : torch::nn::Module {
  static constexpr int64_t kIn = 6, kHidden = 8;
  explicit Running(uint64_t seed) {
    torch::manual_seed(seed);
    in = register_module("in", torch::nn::Linear(kIn, kHidden));
    norm = register_module("norm", torch::nn::BatchNorm1d(kHidden));
    out = register_module("out", torch::nn::Linear(kHidden, 1));
    level = register_buffer("level", torch::zeros({kHidden}));
    table = register_buffer("table", torch::arange(kHidden).to(torch::kFloat) / 7);  // never changes
  }
  // Replaces the submodule "part" with a new one whose only buffer is "level".
  void replace_part(const torch::Tensor& values) {
    if (part) unregister_module("part");
    part = register_module("part", std::make_shared<torch::nn::Module>());
    part_level = part->register_buffer("level", values);
  }
  torch::Tensor loss(int64_t step, int64_t m) {
    auto x = norm(in(parity::draw(step, m, 9, {5, kIn}).to(torch::kFloat) / 4) + table);
    if (is_training()) {
      const torch::NoGradGuard no_grad;
      level.mul_(0.8).add_(0.2 * x.detach().square().mean(0));
    }
    return out(torch::tanh(x - level)).square().mean();
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  std::shared_ptr<torch::nn::Module> part;
  torch::Tensor level, table, part_level;
};

}  // namespace buffers_tests
