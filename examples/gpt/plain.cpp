// The same training in plain libtorch, in one process, without Zeroth, for comparison.
#include <torch/optim/adamw.h>

#include <charconv>
#include <chrono>
#include <cstring>
#include <iostream>
#include <map>
#include <numbers>

#include "data.hpp"
#include "model.hpp"

namespace {

using Flags = std::map<std::string, std::string>;

Flags parse(int argc, char** argv) {
  // The defaults are those of gpt.toml; micro-batches is ranks times gradient accumulation.
  Flags flags{
      {"steps", "600"},      {"seed", "0"},           {"micro-batch", "8"},    {"micro-batches", "2"},
      {"layers", "4"},       {"width", "192"},        {"heads", "6"},          {"context", "128"},
      {"dropout", "0"},      {"lr", "0.003"},         {"final-ratio", "0.05"}, {"warmup", "50"},
      {"clip", "1"},         {"weight-decay", "0.1"}, {"beta2", "0.99"},       {"dtype", "fp32"},
      {"eval-every", "200"}, {"sample", "400"},       {"threads", "0"},        {"text", ZR_DATA_DIR "/jargon.txt.gz"}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = std::string(argv[i]).substr(std::min<size_t>(2, std::strlen(argv[i])));
    if (std::string(argv[i]).rfind("--", 0) != 0 || !flags.count(name) || i + 1 == argc) {
      std::cerr << "gpt_plain: " << argv[i] << ": flags are --NAME VALUE, with these names and defaults:\n";
      for (const auto& [flag, value] : flags) {
        std::cerr << "  --" << flag << ' ' << value << '\n';
      }
      std::exit(2);
    }
    flags[name] = argv[++i];
  }
  return flags;
}

std::string shortest(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

// The learning-rate factor of `schedule = "cosine"`: linear warm-up, then half a cosine down to final_ratio.
double schedule(int64_t step, int64_t steps, int64_t warmup, double final_ratio) {
  if (step < warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
  }
  const double done = static_cast<double>(step - warmup) / static_cast<double>(std::max<int64_t>(1, steps - warmup));
  return final_ratio + (1 - final_ratio) * (1 + std::cos(std::numbers::pi * done)) / 2;
}

double validate(gpt::Model& model, const gpt::Text& text, int64_t context) {
  torch::NoGradGuard no_grad;
  model->eval();
  double sum = 0;
  const auto chunks = text.validation_chunks(context);
  for (int64_t i = 0; i < chunks; ++i) {
    const auto batch = text.validation(i, context);
    sum += model->loss(batch.bytes, batch.next).item<double>();
  }
  model->train();
  return sum / static_cast<double>(chunks);
}

// The fp32 weights that the optimizer updates: the model's own, or master weights of a bf16 model.
struct Weights {
  std::vector<torch::Tensor> model, master;

  explicit Weights(torch::nn::Module& module, bool bf16) {
    for (const auto& p : module.parameters()) {
      master.push_back(bf16 ? p.detach().clone() : p);
    }
    if (bf16) {
      module.to(torch::kBFloat16);
    }
    model = module.parameters();
  }
  void add_gradients() {  // after every backward, in fp32
    for (size_t i = 0; i < model.size() && !model[i].is_same(master[i]); ++i) {
      auto& sum = master[i].mutable_grad();
      sum = sum.defined() ? sum + model[i].grad() : model[i].grad().to(torch::kFloat);
      model[i].mutable_grad().reset();
    }
  }
  void publish() {  // after every step
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < model.size() && !model[i].is_same(master[i]); ++i) {
      model[i].copy_(master[i]);
    }
  }
};

torch::optim::AdamW make_optimizer(const Weights& weights, double lr, double decay, double beta2) {
  std::vector<torch::Tensor> matrices, vectors;  // biases and norms are not decayed
  for (size_t i = 0; i < weights.master.size(); ++i) {
    (weights.master[i].dim() == 2 ? matrices : vectors).push_back(weights.master[i]);
  }
  const auto options = torch::optim::AdamWOptions(lr).betas({0.9, beta2}).eps(1e-8);
  using Group = torch::optim::OptimizerParamGroup;
  return torch::optim::AdamW(
      std::vector<Group>{Group(matrices, std::make_unique<torch::optim::AdamWOptions>(
                                             torch::optim::AdamWOptions(options).weight_decay(decay))),
                         Group(vectors, std::make_unique<torch::optim::AdamWOptions>(
                                            torch::optim::AdamWOptions(options).weight_decay(0)))},
      options);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    auto flags = parse(argc, argv);
    const auto integer = [&](const char* name) { return std::stoll(flags.at(name)); };
    const auto number = [&](const char* name) { return std::stod(flags.at(name)); };
    const gpt::Shape shape{integer("layers"), integer("width"), integer("heads"), integer("context"),
                           number("dropout")};
    const auto steps = integer("steps"), seed = integer("seed"), samples = integer("micro-batch"),
               m_count = integer("micro-batches");
    if (integer("threads") > 0) {
      torch::set_num_threads(static_cast<int>(integer("threads")));
    }
    const gpt::Text text(flags["text"]);
    torch::manual_seed(seed);
    gpt::Model model(shape);
    Weights weights(*model, flags["dtype"] == "bf16");
    auto optimizer = make_optimizer(weights, number("lr"), number("weight-decay"), number("beta2"));

    const auto start = std::chrono::steady_clock::now();
    double validating = 0;
    const auto seconds = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    for (int64_t step = 0; step < steps; ++step) {
      double loss_sum = 0;
      optimizer.zero_grad();
      for (int64_t m = 0; m < m_count; ++m) {
        const auto batch = text.training(seed, step, m, samples, shape.context);
        const auto loss = model->loss(batch.bytes, batch.next);
        (loss / static_cast<double>(m_count)).backward();
        weights.add_gradients();
        loss_sum += loss.item<double>();
      }
      torch::nn::utils::clip_grad_norm_(weights.master, number("clip"));
      for (auto& group : optimizer.param_groups()) {
        group.options().set_lr(number("lr") * schedule(step, steps, integer("warmup"), number("final-ratio")));
      }
      optimizer.step();
      weights.publish();
      const auto every = integer("eval-every");  // 0: never
      const bool due = every > 0 && ((step + 1) % every == 0 || step + 1 == steps);
      if (due || step % 10 == 0) {
        const auto tokens = static_cast<double>((step + 1) * m_count * samples * shape.context);
        std::cout << "step " << step + 1 << " loss " << shortest(loss_sum / static_cast<double>(m_count))
                  << " tokens/s " << static_cast<int64_t>(tokens / (seconds() - validating));
        if (due) {
          const double before = seconds();
          std::cout << " val_loss " << shortest(validate(model, text, shape.context));
          validating += seconds() - before;
        }
        std::cout << " at " << seconds() << " s" << std::endl;
      }
    }
    model->eval();
    std::cout << "--- sample\n"
              << model->sample("\n   ", integer("sample"), static_cast<uint64_t>(seed)) << "\n---" << std::endl;
  } catch (const std::exception& e) {
    std::cerr << "gpt_plain: error: " << e.what() << '\n';
    return 2;
  }
}
