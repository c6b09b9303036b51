// Ways in which a model may use its parameters: each case computes the same with unsharded and with sharded parameters.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace operators {

using torch::Tensor;
using Outputs = std::vector<Tensor>;

/// Parameters "p0", "p1", ... of the given shapes.
struct Weights : torch::nn::Module {
  Weights(std::initializer_list<std::vector<int64_t>> shapes) {
    for (const auto& shape : shapes) {
      own.push_back(register_parameter("p" + std::to_string(own.size()), torch::randn(shape)));
    }
  }
  std::vector<Tensor> own;
};

struct Case {
  std::string name;
  std::function<std::shared_ptr<torch::nn::Module>()> make;         // on the CPU
  std::function<Outputs(torch::nn::Module&, const Tensor& x)> run;  // on the device of x
  std::vector<int64_t> input{8, 16};
  std::string overrides = "";  // of the TOML file
};

const std::vector<Case>& layers();     // modules of torch::nn
const std::vector<Case>& tensors();    // operators and views on bare parameters
const std::vector<Case>& autograds();  // graphs, threads, modes

/// A case on bare parameters: run(parameters, x).
template <class F>
Case bare(std::string name, std::initializer_list<std::vector<int64_t>> shapes, F run, std::string overrides = "") {
  return {std::move(name),
          [shapes = std::vector<std::vector<int64_t>>(shapes)] {
            auto weights = std::make_shared<Weights>(std::initializer_list<std::vector<int64_t>>{});
            for (const auto& shape : shapes)
              weights->own.push_back(
                  weights->register_parameter("p" + std::to_string(weights->own.size()), torch::randn(shape)));
            return weights;
          },
          [run](torch::nn::Module& module, const Tensor& x) -> Outputs {
            return run(dynamic_cast<Weights&>(module).own, x);
          },
          {8, 16},
          std::move(overrides)};
}

}  // namespace operators
