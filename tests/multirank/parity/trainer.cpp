// One rank of the parity tests: trains every test case of a list, one Engine after another, and writes its outcome.
//   parity_trainer TOML LIST OUT     a line of LIST: test case name, then overrides, separated by spaces
#include <torch/torch.h>

#include <fstream>
#include <set>
#include <sstream>

#include "multirank/parity/device.hpp"
#include "multirank/parity/models.hpp"
#include "multirank/parity/one_feature.hpp"
#include "multirank/parity/outcome.hpp"
#include "zr/engine.hpp"
#include "zr/parameters.hpp"
#include "zr/recompute.hpp"

namespace {

// Every parameter as engine.get() returns it, and as the model holds it.
parity::Weights weights_of(zr::Engine& engine, torch::nn::Module& model) {
  parity::Weights weights;
  std::set<const void*> seen;
  for (const auto& item : model.named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;  // tied: one parameter under two names
    const auto value = engine.get(item.key());
    weights[item.key()].assign(value.data_ptr<float>(), value.data_ptr<float>() + value.numel());
    const auto scope = zr::gather(item.value());
    const auto own = item.value().detach().to(torch::kCPU, torch::kFloat).contiguous();
    weights["model's " + item.key()].assign(own.data_ptr<float>(), own.data_ptr<float>() + own.numel());
  }
  return weights;
}

parity::Outcome train(const zr::Program& program) {
  // Every rank builds different weights: the engine must use those of rank 0.
  const auto seed = static_cast<uint64_t>(program.integer("train.seed"));
  auto model = parity::make(program.text("parity.model"), seed + 1000 * static_cast<uint64_t>(program.rank()));
  const auto held = model->script() ? std::make_unique<zr::Engine>(program, *model->script())
                                    : std::make_unique<zr::Engine>(program, *model);
  zr::Engine& engine = *held;
  parity::device = engine.device();  // of the local rank
  parity::Outcome outcome;
  while (!engine.done()) {
    const int64_t m = engine.micro_index();
    const double scale = engine.loss_scale();
    engine.backward(model->loss(engine.step_index(), m),
                    program.boolean("parity.weighted") ? static_cast<double>(m + 1) : 1.0);
    if (!engine.step()) continue;
    outcome.push_back({engine.last_loss(), engine.last_grad_norm(), scale, {}});
    if (engine.done() || program.boolean("parity.trace")) outcome.back().weights = weights_of(engine, *model);
  }
  return outcome;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  return zr::guarded([&] {
    parity::choose_device();
    at::set_num_threads(1);
    parity::recomputed = [](const parity::Block& block, const torch::Tensor& x) { return zr::checkpoint(block, x); };
    const std::vector<zr::Key> keys{{"parity.model", "everything", "which model"},
                                    {"parity.weighted", false, "micro-batches of unequal weight"},
                                    {"parity.trace", false, "keep the weights after every step"}};
    std::ifstream list(argv[2]);
    for (std::string line; std::getline(list, line);) {
      std::istringstream words(line);
      std::string name, word;
      words >> name;
      std::vector<std::string> overrides;
      while (words >> word) overrides.push_back(word);
      const zr::Program program(argv[1], overrides, keys);
      const parity::Outcome outcome = train(program);
      save(outcome, std::string(argv[3]) + "/" + name + "." + std::to_string(program.rank()));
    }
  });
}
