// Trains a small GPT on a device. After the first step, the last rank fails in the named way:
//   [zeroth launch -n 2 --] gpu_fault DEVICE memory|killed|assertion [path=value ...]
// memory: it allocates memory of the device until that fails. killed: SIGKILL. assertion: an index outside of the
// embedding, which libtorch's kernel for CUDA asserts; the process loses its device then (cudaErrorAssert).
#include <torch/torch.h>

#include <csignal>
#include <string>
#include <vector>

#include "gpt/model.hpp"
#include "gpu/row.hpp"
#include "zr/engine.hpp"

namespace {

constexpr int64_t kSteps = 3, kSamples = 2;
const gpt::Shape kShape{2, 64, 2, 32, 0};

zr::Configuration configuration(const std::string& device) {
  zr::Configuration config;
  config.set("job.device", device).set("job.name", "gpu_fault").set("job.runs", "/tmp/gpu_step_runs");
  config.set("train.dtype", "bf16").set("train.steps", kSteps).set("train.micro_batch", kSamples);
  config.set("strategy", "zero2").set("optimizer", "adamw");
  return config;
}

void fail(const std::string& kind, at::Device device, torch::Tensor& bytes) {
  if (kind == "killed") std::raise(SIGKILL);
  if (kind == "assertion") bytes = bytes + gpt::kVocabulary;
  std::vector<torch::Tensor> all;
  while (kind == "memory")
    all.push_back(torch::empty({256 << 20}, torch::TensorOptions().device(device).dtype(torch::kByte)));
}

void train(const std::string& device, const std::string& kind, const std::vector<std::string>& overrides) {
  const zr::Program program(configuration(device), overrides);
  gpt::Model model(kShape);
  zr::Engine engine(program, *model);
  torch::Tensor bytes =
      torch::randint(0, gpt::kVocabulary, {kSamples, kShape.context}, torch::kLong).to(engine.device());
  for (int64_t step = 0; !engine.done(); ++step) {
    if (step == 1 && program.rank() == program.world() - 1) fail(kind, engine.device(), bytes);
    engine.backward(model->loss(bytes, bytes));
    engine.step();
  }
}

}  // namespace

int main(int argc, char** argv) {
  zr::testing::print_each_line_at_once();
  return zr::guarded([&] {
    const std::string kind = argc > 2 ? argv[2] : "";
    if (kind != "memory" && kind != "killed" && kind != "assertion")
      throw std::invalid_argument("gpu_fault DEVICE memory|killed|assertion [path=value ...]");
    train(argv[1], kind, {argv + 3, argv + argc});
  });
}
