// A small model whose loss depends on its buffers: batch statistics, and a running level that forward subtracts; and
// its training.
#pragma once

#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "multirank/parity/model.hpp"
#include "support/engine_run.hpp"

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

using engine_tests::Run;
using engine_tests::same;
using Buffers = std::map<std::string, torch::Tensor>;

// A training run in this process, with its own program, model and engine.
struct Job {
  Job(const Run& run, const std::vector<std::string>& more, const torch::Tensor& part = {})
      : program(run.arguments[0], joined(run.arguments, more)), model(7), engine(program, with(model, part)) {}
  static Running& with(Running& model, const torch::Tensor& part) {
    if (part.defined()) model.replace_part(part);
    return model;
  }
  static std::vector<std::string> joined(const std::vector<std::string>& a, const std::vector<std::string>& b) {
    std::vector<std::string> all(a.begin() + 1, a.end());
    all.insert(all.end(), b.begin(), b.end());
    return all;
  }
  void step() {
    const int64_t before = engine.step_index();
    while (engine.step_index() == before) {
      engine.backward(model.loss(engine.step_index(), engine.micro_index()));
      engine.step();
    }
    losses.push_back(engine.last_loss());
  }
  void train() {
    while (!engine.done()) step();
  }
  Buffers buffers() const {
    Buffers all;
    for (const auto& item : model.named_buffers()) all[item.key()] = item.value().clone();
    return all;
  }
  double validation() {
    const zr::Engine::Evaluation evaluation(engine);
    model.eval();
    const double loss = model.loss(999, 0).item<double>();
    model.train();
    return loss;
  }
  zr::Program program;
  Running model;
  zr::Engine engine;
  std::vector<double> losses;
};

inline bool equal(const Buffers& a, const Buffers& b) {
  for (const auto& [name, tensor] : a)
    if (!b.count(name) || !same(tensor, b.at(name))) return false;
  return a.size() == b.size();
}

}  // namespace buffers_tests
