// One rank of the tests of how programs use zr::Engine: several engines, training past the last step, writes to weights
// that differ by rank.
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "multirank/engine_run.hpp"
#include "zr/parameters.hpp"

namespace {

using engine_tests::require;
using engine_tests::Run;
namespace fs = std::filesystem;

// --- Two models that train each other ---

constexpr int64_t kNoise = 5, kSample = 7, kBatch = 3;

// Random numbers that depend only on step, micro-batch and purpose.
torch::Tensor numbers(int64_t step, int64_t micro, int64_t purpose, int64_t columns) {
  return torch::randn({kBatch, columns}, at::make_generator<at::CPUGeneratorImpl>(
                                             static_cast<uint64_t>((step * 64 + micro) * 4 + purpose + 1)));
}

struct Pair {
  explicit Pair(uint64_t seed) {
    torch::manual_seed(seed);
    generator = torch::nn::Sequential(torch::nn::Linear(kNoise, 16), torch::nn::Tanh(), torch::nn::Linear(16, kSample));
    discriminator = torch::nn::Sequential(torch::nn::Linear(kSample, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
  }
  torch::nn::Sequential generator{nullptr}, discriminator{nullptr};
  torch::Tensor fake(int64_t step, int64_t micro, int64_t purpose) {
    return generator->forward(numbers(step, micro, purpose, kNoise));
  }
  torch::Tensor classification_loss(const torch::Tensor& samples, bool real) {
    const auto logits = discriminator->forward(samples);
    return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, real ? 1.0 : 0.0));
  }
  torch::Tensor discriminator_loss(int64_t step, int64_t micro) {
    return classification_loss(numbers(step, micro, 0, kSample) + 1, true) +
           classification_loss(fake(step, micro, 1).detach(), false);
  }
  torch::Tensor generator_loss(int64_t step, int64_t micro) { return classification_loss(fake(step, micro, 2), true); }
  void learn(bool discriminator_learns) {
    for (auto& p : discriminator->parameters()) p.requires_grad_(discriminator_learns);
  }
};

// The losses of generator and discriminator per step, trained with plain libtorch in one process.
std::vector<std::pair<double, double>> plain(const zr::Program& program, int64_t steps, int64_t micros) {
  Pair pair(7);
  const auto options = torch::optim::AdamWOptions(program.number("optimizer.lr")).weight_decay(0.01);
  torch::optim::AdamW generator(pair.generator->parameters(), options),
      discriminator(pair.discriminator->parameters(), options);
  std::vector<std::pair<double, double>> losses;
  for (int64_t step = 0; step < steps; ++step) {
    double d = 0, g = 0;
    const auto mean = [&](torch::Tensor loss, double& sum) {
      loss = loss / static_cast<double>(micros);
      loss.backward();
      sum += loss.item<double>();
    };
    discriminator.zero_grad();
    for (int64_t m = 0; m < micros; ++m) mean(pair.discriminator_loss(step, m), d);
    discriminator.step();
    pair.learn(false);
    generator.zero_grad();
    for (int64_t m = 0; m < micros; ++m) mean(pair.generator_loss(step, m), g);
    generator.step();
    pair.learn(true);
    losses.emplace_back(g, d);
  }
  return losses;
}

// Trains each model with its own engine. The loss of every step must equal plain libtorch's.
void gan(Run& run) {
  Pair pair(run.program.rank() == 0 ? 7 : 8);
  zr::Engine generator(run.program, *pair.generator, "generator");
  zr::Engine discriminator(run.program, *pair.discriminator, "discriminator");
  require(generator.step_index() == discriminator.step_index(), "both resume from the same step");
  const int64_t micros = generator.world() * generator.accumulation();
  const auto expected = plain(run.program, generator.steps(), micros);
  while (!generator.done()) {
    const int64_t step = generator.step_index();
    for (int a = 0; a < discriminator.accumulation(); ++a) {
      discriminator.backward(pair.discriminator_loss(step, discriminator.micro_index()));
      discriminator.step();
    }
    pair.learn(false);
    for (int a = 0; a < generator.accumulation(); ++a) {
      generator.backward(pair.generator_loss(step, generator.micro_index()));
      generator.step();
    }
    pair.learn(true);
    const auto [g, d] = expected[static_cast<std::size_t>(step)];
    require(std::abs(generator.last_loss() - g) < 1e-5 * g && std::abs(discriminator.last_loss() - d) < 1e-5 * d,
            "step " + std::to_string(step) + ": losses are " + std::to_string(generator.last_loss()) + " and " +
                std::to_string(discriminator.last_loss()) + "; plain libtorch's are " + std::to_string(g) + " and " +
                std::to_string(d));
  }
}

// --- Engines and their names ---

// A second engine of the same name while the first is alive.
void same_name(Run& run, const std::string& name) {
  Pair pair(7);
  zr::Engine first(run.program, *pair.generator, name);
  zr::Engine second(run.program, *pair.discriminator, name);
}

void one_after_another(Run& run) {
  for (int i = 0; i < 2; ++i) {
    run.build();
    run.train();
    run.engine.reset();
  }
}

void bad_name(Run& run) {
  Pair pair(7);
  const char* name = std::getenv("ENGINE_NAME");
  zr::Engine engine(run.program, *pair.generator, name ? name : "a/b");
}

// --- The end of a run ---

void past_the_end(Run& run) {
  run.build();
  while (run.engine->step_index() < run.engine->steps() + 3) run.micro_step();
  if (std::getenv("FINISH")) {
    run.engine->finish();
    std::ofstream(fs::path(run.program.text("job.runs")) / "hash") << run.engine->weights_hash();
  }
}

// The checkpoint of the last step cannot be written, because a file has replaced the checkpoint folder.
void last_save_fails(Run& run) {
  run.build();
  while (run.engine->step_index() < run.engine->steps() - 1) run.micro_step();
  if (run.program.rank() == 0) {
    const fs::path folder = run.program.text("checkpoint.dir");
    fs::rename(folder, folder.string() + ".moved");
    std::ofstream(folder) << "a file\n";
  }
  run.train();
}

// Sets a weight after the last step, so that the hash computed for the last step is outdated.
void set_after_the_end(Run& run) {
  run.build();
  run.train();
  run.engine->set("scalar", zr::TensorKind::value, run.engine->get("scalar") + 1);
}

// --- Writes to weights that differ by rank ---

bool last_rank(const Run& run) { return run.engine->rank() == run.engine->world() - 1; }

// After every step, rank 0 or every rank clamps a weight.
void clamp(Run& run, bool everywhere) {
  run.build();
  while (!run.engine->done()) {
    run.micro_step();
    const torch::NoGradGuard no_grad;
    if (everywhere || run.engine->rank() == 0) run.model->named_parameters()["twice.weight"].clamp_(-0.01, 0.01);
  }
}

// After every step, reads weights in a zr::gather scope and undoes a write. The checkpoint of the step must not change.
void write_back(Run& run) {
  run.build();
  const torch::Tensor weight = run.model->named_parameters()["twice.weight"];
  while (!run.engine->done()) {
    run.micro_step();
    const torch::NoGradGuard no_grad;
    {
      const auto scope = zr::gather(run.model->parameters());
      require(weight.norm().item<float>() > 0, "the weights can be read");
    }
    const torch::Tensor own = weight.clone();
    weight.zero_();
    weight.copy_(own);
  }
}
// The program writes to a weight and then saves, as the log advises, in addition to checkpoint.every.
void clamp_and_save(Run& run) {
  run.build();
  while (!run.engine->done()) {
    run.micro_step();
    const torch::NoGradGuard no_grad;
    run.model->named_parameters()["twice.weight"].clamp_(-0.01, 0.01);
    run.engine->save(run.program.text("checkpoint.dir"));
  }
}

// After every step, rank 0 (or no rank) writes to a weight without changing its values.
void write_nothing(Run& run, bool writes) {
  run.build();
  while (!run.engine->done()) {
    run.micro_step();
    const torch::NoGradGuard no_grad;
    if (writes && run.engine->rank() == 0) run.model->named_parameters()["twice.weight"].clamp_(-1e9, 1e9);
  }
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) std::cout << "hash " << hash << std::endl;
}

// Every rank fills a weight from its own random generator.
void draw_per_rank(Run& run) {
  run.build();
  run.micro_step();
  {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(static_cast<uint64_t>(run.engine->rank()));
    run.model->named_parameters()["large.weight"].normal_();
  }
  run.micro_step();
}

// The last rank changes one element through its address; libtorch cannot detect this write.
void write_by_address(Run& run, const std::string& parameter) {
  run.build();
  run.micro_step();
  if (last_rank(run)) run.model->named_parameters()[parameter].data_ptr<float>()[21] += 1;
  run.train();
}

void set_per_rank(Run& run) {
  run.build();
  run.engine->set("scalar", zr::TensorKind::value, torch::full({}, run.engine->rank()));
}

// From the second step on, the last rank's loss is NaN.
void skips(Run& run) {
  run.build();
  while (!run.engine->done()) {
    const bool nan_loss = run.engine->step_index() >= 1 && last_rank(run);
    const auto loss = run.model->loss(run.engine->step_index(), run.engine->micro_index());
    run.engine->backward(nan_loss ? loss * std::numeric_limits<float>::quiet_NaN() : loss);
    run.engine->step();
  }
}

const engine_tests::Cases kCases{{"gan", gan},
                                 {"same_name", [](Run& run) { same_name(run, "generator"); }},
                                 {"no_names", [](Run& run) { same_name(run, ""); }},
                                 {"one_after_another", one_after_another},
                                 {"bad_name", bad_name},
                                 {"clamp_rank_zero", [](Run& run) { clamp(run, false); }},
                                 {"write_back", write_back},
                                 {"clamp_and_save", clamp_and_save},
                                 {"clamp_everywhere", [](Run& run) { clamp(run, true); }},
                                 {"writes_nothing", [](Run& run) { write_nothing(run, true); }},
                                 {"trains_alike", [](Run& run) { write_nothing(run, false); }},
                                 {"draw_per_rank", draw_per_rank},
                                 {"write_by_address", [](Run& run) { write_by_address(run, "embedding.weight"); }},
                                 {"write_frozen", [](Run& run) { write_by_address(run, "frozen.weight"); }},
                                 {"set_per_rank", set_per_rank},
                                 {"skips", skips},
                                 {"past_the_end", past_the_end},
                                 {"last_save_fails", last_save_fails},
                                 {"set_after_the_end", set_after_the_end}};

}  // namespace

int main(int argc, char** argv) { return engine_tests::run_case(argc, argv, kCases); }
