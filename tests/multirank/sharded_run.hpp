// Shared by the cases on sharded parameters: a small model in training.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "zr/engine.hpp"

namespace sharded_tests {

struct Net : torch::nn::Module {
  Net() {
    in = register_module("first", torch::nn::Linear(48, 64));
    out = register_module("last", torch::nn::Linear(64, 40));
  }
  torch::Tensor loss(const torch::Tensor& x) {
    return out(torch::gelu(in(x.to(in->weight.scalar_type())))).to(torch::kFloat).square().mean();
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
};

struct Run {
  explicit Run(const zr::Program& p) : program(p) {
    torch::manual_seed(5);
    net = std::make_shared<Net>();
    engine = std::make_unique<zr::Engine>(program, *net);
  }
  void backward() {
    torch::manual_seed(100 + engine->step_index());
    engine->backward(net->loss(torch::randn({4, 48})));
  }
  void step() {
    backward();
    engine->step();
  }
  const zr::Program& program;
  std::shared_ptr<Net> net;
  std::unique_ptr<zr::Engine> engine;
};

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error("check failed: " + what);
}

using Cases = std::map<std::string, std::function<void(Run&)>>;
/// The cases of sharded_memory_case.cpp, on the memory of a rank.
const Cases& memory_cases();

}  // namespace sharded_tests
