// Shared by the tests of refresh(): a model of independent parts, and its training.
#pragma once

#include <torch/torch.h>

#include <limits>
#include <set>

#include "multirank/model/model_run.hpp"

namespace model_tests {

/// Linear modules by name. The values of a part do not depend on the other parts.
struct Parts : torch::nn::Module {
  static constexpr int64_t kIn = 12;
  torch::nn::Linear add(const std::string& name, int64_t out = 10) {
    torch::manual_seed(static_cast<uint64_t>(name.back()) + static_cast<uint64_t>(out));
    torch::nn::Linear part(kIn, out);
    const torch::NoGradGuard no_grad;  // bf16 values, because a frozen weight under bf16 is rounded
    for (torch::Tensor& p : part->parameters()) p.copy_(p.to(torch::kBFloat16));
    return parts.insert_or_assign(name, register_module(name, part)).first->second;
  }
  torch::Tensor loss(int64_t micro) {
    const torch::Tensor x =
        (torch::arange(4 * kIn, torch::kFloat) * static_cast<double>(micro + 1)).sin().view({4, kIn});
    torch::Tensor sum = torch::zeros({});
    for (auto& [name, part] : parts)
      sum = sum + torch::tanh(part(x.to(part->weight.scalar_type()))).to(torch::kFloat).square().mean();
    return sum;
  }
  std::map<std::string, torch::nn::Linear> parts;
};

/// The weight and states of a part after each step.
using History = std::vector<torch::Tensor>;

/// A model of parts and its engine, on data that depends on the step alone.
struct Training {
  Training(const Run& run, const SharingMode& how, const std::vector<std::string>& keys) : world(run.program.world()) {
    std::vector<std::string> more{"optimizer.lr=0.05", "train.steps=6"};
    more.insert(more.end(), keys.begin(), keys.end());
    program = std::make_unique<zr::Program>(program_of(run, how, more, {"optimizer=adamw"}));
  }
  void start() { engine = std::make_unique<zr::Engine>(*program, net); }
  // Trains steps [first, end).
  void train(int64_t first, int64_t end) {
    for (int64_t step = first; step < end; ++step) {
      for (int micro = 0; micro < engine->accumulation(); ++micro) {
        const int64_t batch = step * world * engine->accumulation() + engine->micro_index();
        const torch::Tensor loss = net.loss(batch);
        engine->backward(skips.count(step) ? loss * std::numeric_limits<float>::infinity() : loss);
        engine->step();
      }
      losses.push_back(engine->last_loss());
      scales.push_back(engine->loss_scale());
      for (auto& [name, part] : net.parts)
        if (part->weight.requires_grad()) note(name);
    }
  }
  void note(const std::string& name) {
    const std::string weight = name + ".weight";
    histories[name].push_back(torch::stack({engine->get(weight), engine->get(weight, zr::TensorKind::state, "exp_avg"),
                                            engine->get(weight, zr::TensorKind::state, "exp_avg_sq")}));
  }
  int world;
  std::unique_ptr<zr::Program> program;
  Parts net;
  std::unique_ptr<zr::Engine> engine;
  std::set<int64_t> skips;  // steps whose loss is infinite
  std::map<std::string, History> histories;
  std::vector<double> losses, scales;  // after each step
};

inline bool equal(const History& a, const History& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(),
                    [](const torch::Tensor& x, const torch::Tensor& y) { return torch::equal(x, y); });
}

}  // namespace model_tests
