// One rank of the operator tests: runs every case with a plain module, then with a sharded one; prints "ok NAME" or
// "WRONG NAME: " and the first difference.
//   operators_trainer TOML [path=value ...]
#include <cstring>
#include <iostream>
#include <sstream>

#include "multirank/operators/cases.hpp"
#include "zr/engine.hpp"

namespace {

using operators::Case;
using torch::Tensor;

constexpr int kSteps = 3;  // the first step records the execution order, later steps follow it

std::string bytes(const Tensor& tensor) {
  if (!tensor.defined()) return "";
  const Tensor plain = (tensor.is_sparse() ? tensor.to_dense() : tensor).detach().contiguous();
  return {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()};
}

struct Seen {
  std::vector<std::pair<std::string, std::string>> values;  // description, and the bytes of the tensor
  void add(const std::string& what, const Tensor& tensor) { values.emplace_back(what, bytes(tensor)); }
};

std::pair<Tensor, Tensor> forward(const Case& one, torch::nn::Module& module, int step, Seen& seen) {
  torch::manual_seed(7 + step);
  const Tensor x = torch::randn(one.input).requires_grad_(true);
  Tensor loss;
  int i = 0;
  for (const Tensor& y : one.run(module, x)) {
    seen.add("output " + std::to_string(i++) + " of step " + std::to_string(step), y);
    if (!y.requires_grad()) continue;
    const Tensor value = y.to(torch::kFloat);
    const Tensor part = (value * value.detach().cos()).sum();
    loss = loss.defined() ? loss + part : part;
  }
  return {loss, x};
}

Seen plainly(const Case& one) {
  Seen seen;
  torch::manual_seed(3);
  const auto module = one.make();
  for (int step = 0; step < kSteps; ++step) {
    const auto [loss, x] = forward(one, *module, step, seen);
    for (auto& parameter : module->parameters()) parameter.mutable_grad() = Tensor();
    loss.backward();
    seen.add("gradient of the input", x.grad());
    for (const auto& item : module->named_parameters()) {
      const Tensor gradient = item.value().grad();
      seen.add("gradient of " + item.key(), gradient.defined() ? gradient : torch::zeros_like(item.value()));
    }
  }
  return seen;
}

Seen sharded(const Case& one, const std::string& toml, std::vector<std::string> overrides) {
  Seen seen;
  torch::manual_seed(3);
  const auto module = one.make();
  if (!one.overrides.empty()) overrides.push_back(one.overrides);
  zr::Engine engine(zr::Program(toml, overrides), *module);
  for (int step = 0; step < kSteps; ++step) {
    const auto [loss, x] = forward(one, *module, step, seen);
    engine.backward(loss);
    engine.step();
    seen.add("gradient of the input", x.grad());
    for (const auto& item : module->named_parameters())
      seen.add("gradient of " + item.key(), engine.get(item.key(), zr::TensorKind::gradient));
  }
  return seen;
}

std::string difference(const Seen& plain, const Seen& shard) {
  for (std::size_t i = 0; i < plain.values.size(); ++i) {
    if (i >= shard.values.size()) return "ends early";
    const auto& [what, is] = plain.values[i];
    if (shard.values[i].second != is) return what + " differs";
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  return zr::guarded([&] {
    at::set_num_threads(1);
    const std::vector<std::string> overrides(argv + 2, argv + argc);
    for (const auto* list : {&operators::layers(), &operators::tensors(), &operators::autograds()})
      for (const Case& one : *list) {
        const std::string wrong = difference(plainly(one), sharded(one, argv[1], overrides));
        std::cout << (wrong.empty() ? "ok " + one.name : "WRONG " + one.name + ": " + wrong) << std::endl;
      }
  });
}
