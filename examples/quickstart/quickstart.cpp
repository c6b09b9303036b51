// Your own main(): trains an unmodified libtorch module as quickstart.toml configures.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn.h>

#include <iostream>

#include "zr/engine.hpp"

namespace {

// The function to learn.
torch::Tensor truth(const torch::Tensor& x) { return torch::sin(3 * x).sum(1, /*keepdim=*/true); }

// The points depend only on seed, step and micro-batch index: ranks and accumulation do not change the training data.
torch::Tensor points(const zr::Engine& engine) {
  const auto counter = (engine.seed() * 1'000'003 + engine.step_index()) * 1'000'003 + engine.micro_index();
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(counter));
  return torch::rand({engine.micro_batch(), 4}, generator) * 2 - 1;
}

void train(const zr::Program& program) {
  torch::manual_seed(static_cast<uint64_t>(program.integer("train.seed")));
  torch::nn::Sequential model(torch::nn::Linear(4, 128), torch::nn::Tanh(), torch::nn::Linear(128, 128),
                              torch::nn::Tanh(), torch::nn::Linear(128, 1));
  zr::Engine engine(program, *model);

  while (!engine.done()) {
    const auto x = points(engine).to(engine.device());
    engine.backward(torch::mse_loss(model->forward(x), truth(x)));
    if (engine.step() && engine.rank() == 0 && engine.step_index() % 100 == 0) {
      std::cout << "step " << engine.step_index() << " loss " << engine.last_loss() << std::endl;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return zr::guarded([&] { train(zr::Program(argc, argv)); });
}
