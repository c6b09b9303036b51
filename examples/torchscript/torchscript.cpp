// Trains a model that is stored in a TorchScript file. If the file does not exist, it writes the file first.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/nn.h>

#include <filesystem>
#include <iostream>

#include "zr/engine.hpp"

namespace {

// Does what `torch.jit.script(model).save(file)` does in Python; the default generator draws the weights.
void write_model(const std::string& file) {
  torch::jit::Module model("Net");
  const auto add = [&](const std::string& name, int64_t in, int64_t out) {
    const torch::nn::Linear line(in, out);
    model.register_parameter(name + "_weight", line->weight, false);
    model.register_parameter(name + "_bias", line->bias, false);
  };
  add("first", 4, 128);
  add("second", 128, 128);
  add("last", 128, 1);
  model.define(R"(
    def forward(self, x):
        x = torch.tanh(torch.linear(x, self.first_weight, self.first_bias))
        for i in range(2):
            x = x + torch.tanh(torch.linear(x, self.second_weight, self.second_bias)) * 0.5
        return torch.linear(x, self.last_weight, self.last_bias)
  )");
  std::filesystem::create_directories(std::filesystem::absolute(file).parent_path());
  model.save(file + ".part" + std::to_string(::getpid()));
  std::filesystem::rename(file + ".part" + std::to_string(::getpid()), file);
}

// The function to learn, and points that depend only on seed, step and micro-batch index.
torch::Tensor truth(const torch::Tensor& x) { return torch::sin(3 * x).sum(1, /*keepdim=*/true); }
torch::Tensor points(const zr::Engine& engine) {
  const auto counter = (engine.seed() * 1'000'003 + engine.step_index()) * 1'000'003 + engine.micro_index();
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(counter));
  return torch::rand({engine.micro_batch(), 4}, generator) * 2 - 1;
}

void train(const zr::Program& program) {
  torch::manual_seed(static_cast<uint64_t>(program.integer("train.seed")));
  const std::string file = program.text("model.file");
  if (!std::filesystem::exists(file)) write_model(file);
  auto model = torch::jit::load(file);
  model.train();
  zr::Engine engine(program, model);

  while (!engine.done()) {
    const auto x = points(engine).to(engine.device());
    engine.backward(torch::mse_loss(model.forward({x}).toTensor(), truth(x)));
    if (engine.step() && engine.rank() == 0 && engine.step_index() % 100 == 0) {
      std::cout << "step " << engine.step_index() << " loss " << engine.last_loss() << std::endl;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return zr::guarded([&] {
    train(zr::Program(
        argc, argv,
        {zr::Key::of_path("model.file", "runs/torchscript.pt", "the TorchScript file; written if missing")}));
  });
}
