// Tensors that share memory with a parameter and exist before the engine is created. Each body trains a model with one
// such tensor under every strategy and compares every loss with a plain libtorch loop on the same model.
#include <torch/torch.h>

#include "multirank/model/model_run.hpp"
#include "zr/parameters.hpp"

namespace model_tests {
namespace {

constexpr int64_t kWidth = 8;

using torch::Tensor;

struct Net : torch::nn::Module {
  explicit Net(const std::string& kind) : pattern(kind) {
    torch::manual_seed(3);
    first = register_module("first", torch::nn::Linear(kWidth, kWidth));
    last = register_module("last", torch::nn::Linear(kWidth, kWidth));
    build();
  }

  void build() {
    const auto matrix = [](const Tensor& flat, int64_t at) {
      return flat.narrow(0, at * kWidth * kWidth, kWidth * kWidth).view({kWidth, kWidth});
    };
    const Tensor weight = last->weight;
    if (pattern == "view" || pattern == "bf16_view") kept = weight.t();
    if (pattern == "view_without_grad") {
      const torch::NoGradGuard no_grad;
      kept = weight.t();
    }
    if (pattern == "detach") kept = weight.detach();
    if (pattern == "data") kept = weight.variable_data();
    if (pattern == "chunks") more = weight.detach().chunk(2);
    if (pattern == "second_model") {
      second = torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false));
      second->weight.set_requires_grad(false).set_data(weight.detach());
    }
    if (pattern == "flat_parameters" || pattern == "flat_base") {
      Tensor flat = torch::randn({2 * kWidth * kWidth});
      for (const char* name : {"left", "right"}) more.push_back(register_parameter(name, matrix(flat, name[0] == 'r')));
      if (pattern == "flat_base") kept = flat;
    }
    if (pattern == "columns") {
      const Tensor wide = torch::randn({kWidth, 2 * kWidth});
      for (const char* name : {"left", "right"})
        more.push_back(register_parameter(name, wide.narrow(1, name[0] == 'r' ? kWidth : 0, kWidth)));
    }
    if (pattern == "overlap") {
      const Tensor flat = torch::randn({2 * kWidth * kWidth});
      more.push_back(register_parameter("left", matrix(flat, 0)));
      more.push_back(register_parameter("right", flat.narrow(0, kWidth, kWidth * kWidth).view({kWidth, kWidth})));
    }
    if (pattern == "blobs" || pattern == "blob_buffer") {  // two storages on overlapping addresses
      floats.assign(2 * kWidth * kWidth, 0.5F);
      const auto blob = [&](int64_t at) { return torch::from_blob(floats.data() + at, {kWidth, kWidth}); };
      more.push_back(register_parameter("left", blob(0)));
      more.push_back(pattern == "blobs" ? register_parameter("right", blob(kWidth))
                                        : register_buffer("right", blob(kWidth)));
    }
    if (pattern == "part_blob") {  // overlapping addresses; the second tensor is part of a larger storage
      floats.assign(2 * kWidth * kWidth, 0.5F);
      more.push_back(register_parameter("left", torch::from_blob(floats.data() + kWidth * kWidth, {kWidth, kWidth})));
      more.push_back(register_parameter("right", matrix(torch::from_blob(floats.data(), {2 * kWidth * kWidth}), 1)));
    }
    if (pattern == "set_data_tie") first->weight.set_data(weight);
    if (pattern == "expanded") register_parameter("wide", torch::zeros({1}).expand({kWidth}));
    if (pattern == "buffer_view") kept = register_buffer("seen", weight.detach().view(-1));
    if (pattern == "buffer_beside" || pattern == "buffer_beside_kept") {
      const Tensor flat = torch::randn({2 * kWidth * kWidth});
      more.push_back(register_parameter("left", matrix(flat, 0).detach()));
      more.push_back(register_buffer("right", matrix(flat, 1).detach()));
      if (pattern == "buffer_beside_kept") kept = flat;
    }
    if (pattern == "tied") {
      tied = register_module("tied", std::make_shared<torch::nn::Module>());
      kept = tied->register_parameter("weight", weight);
    }
    if (pattern == "lstm") {
      lstm = register_module("lstm", torch::nn::LSTM(kWidth, kWidth));
      lstm->flatten_parameters();
    }
    if (pattern == "optimizer") {
      optimizer = std::make_shared<torch::optim::SGD>(parameters(), torch::optim::SGDOptions(0.1));
      names = named_parameters();
    }
    if (pattern == "held_loss") kept = loss(0).sum();
  }

  Tensor loss(int64_t micro) {
    const Tensor x =
        (torch::arange(4 * kWidth, torch::kFloat) * static_cast<double>(micro + 1)).sin().view({4, kWidth});
    const Tensor hidden = torch::tanh(first(x.to(first->weight.scalar_type())));
    Tensor y = last(hidden);
    if (pattern == "view" || pattern == "view_without_grad" || pattern == "bf16_view")
      y = y + hidden.matmul(kept.to(hidden.scalar_type()));
    if (pattern == "detach" || pattern == "data" || pattern == "tied") y = y + torch::linear(hidden, kept);
    if (pattern == "buffer_view") y = y + torch::linear(hidden, kept.view({kWidth, kWidth}));
    if (pattern == "second_model") y = y + second(hidden);
    if (pattern == "chunks") y = y + torch::cat({torch::linear(hidden, more[0]), torch::linear(hidden, more[1])}, -1);
    if (pattern == "flat_parameters" || pattern == "flat_base" || pattern == "columns" || pattern == "overlap" ||
        pattern == "buffer_beside" || pattern == "buffer_beside_kept")
      y = y + torch::linear(hidden, more[0]) + torch::linear(hidden, more[1]);
    if (pattern == "flat_base" || pattern == "buffer_beside_kept") y = y * kept.narrow(0, 3, kWidth);
    if (pattern == "lstm") y = y + std::get<0>(lstm(hidden.unsqueeze(0))).squeeze(0);
    return y.to(torch::kFloat).square().mean();
  }

  std::string pattern;
  torch::nn::Linear first{nullptr}, last{nullptr}, second{nullptr};
  torch::nn::LSTM lstm{nullptr};
  std::shared_ptr<torch::nn::Module> tied;
  std::shared_ptr<torch::optim::SGD> optimizer;
  torch::OrderedDict<std::string, Tensor> names;
  Tensor kept;
  std::vector<Tensor> more;
  std::vector<float> floats;
};

// The losses of all micro-batches and the weights after the last step.
struct Outcome {
  std::vector<float> losses;
  std::map<std::string, Tensor> weights;
};

Outcome plain(const std::string& pattern, int64_t steps, int world) {
  Net net(pattern);
  std::vector<Tensor> trained;
  for (const Tensor& parameter : net.parameters())  // lists a tied parameter twice
    if (std::none_of(trained.begin(), trained.end(), [&](const Tensor& one) { return one.is_same(parameter); }))
      trained.push_back(parameter);
  torch::optim::SGD sgd(trained, torch::optim::SGDOptions(0.0625));
  Outcome outcome;
  for (int64_t step = 0; step < steps; ++step) {
    sgd.zero_grad();
    for (int rank = 0; rank < world; ++rank) {
      const Tensor loss = net.loss(step * world + rank);
      outcome.losses.push_back(loss.item<float>());
      (loss / world).backward();
    }
    sgd.step();
  }
  for (const auto& item : net.named_parameters()) outcome.weights[item.key()] = item.value().detach().clone();
  return outcome;
}

// Prints "equal" for each strategy, or the error that the engine or an operator throws.
void compare(Run& run, const std::string& pattern, const std::vector<std::string>& keys = {}) {
  const int world = run.program.world(), rank = run.program.rank();
  Outcomes outcomes(run);
  const Outcome expected =
      plain(pattern, 4, pattern == "overlap" || pattern == "expanded" || pattern.starts_with("blob") ? 0 : world);
  for (const SharingMode& how : sharing_modes(world)) {
    const zr::Program program = program_of(run, how, keys);
    Net net(pattern);
    std::unique_ptr<zr::Engine> engine;
    const std::string error = error_of([&] {
      engine = std::make_unique<zr::Engine>(program, net);
      for (int64_t step = 0; step < 4; ++step) {
        const Tensor loss = net.loss(step * world + rank);
        const auto at = static_cast<std::size_t>(step * world + rank);
        EXPECT_EQ(loss.item<float>(), expected.losses.at(at)) << pattern + " under " + how.text(world) +
                                                                     ": the loss of step " + std::to_string(step) +
                                                                     " equals plain libtorch's";
        engine->backward(loss);
        engine->step();
      }
      for (const auto& [name, weight] : expected.weights)
        EXPECT_TRUE(same(engine->get(name), weight))
            << pattern + " under " + how.text(world) + ": " + name + " is the same";
      engine.reset();
      if (pattern == "view" && how.strategy == "zero0") {
        EXPECT_TRUE(same(net.kept, net.last->weight.t()))
            << "the view still aliases the weight after the engine is destroyed";
      }
    });
    engine.reset();
    outcomes.add(how, error.empty() ? "equal" : error);
  }
}

// A second engine trains a model that another engine has trained before; a view of a weight exists each time.
void engine_before(Run& run) {
  const int world = run.program.world(), rank = run.program.rank();
  Outcomes outcomes(run);
  for (const SharingMode& how : sharing_modes(world)) {
    if (how.strategy == "zero3" && world > 1) continue;  // a sharded model has no weights once its engine is destroyed
    const zr::Program program = program_of(run, how);
    Net net("view");
    std::vector<float> losses;
    for (int engines = 0; engines < 2; ++engines) {
      net.kept = net.last->weight.t();
      zr::Engine engine(program, net);
      net.kept = net.last->weight.t();  // a view without gradients may not be kept while weights change
      for (int64_t step = 0; step < 2; ++step) {
        const Tensor loss = net.loss((2 * engines + step) * world + rank);
        losses.push_back(loss.item<float>());
        engine.backward(loss);
        engine.step();
      }
    }
    const Outcome expected = plain("view", 4, world);
    bool equal = true;
    for (std::size_t step = 0; step < losses.size(); ++step)
      equal &= losses[step] == expected.losses[step * static_cast<std::size_t>(world) + static_cast<std::size_t>(rank)];
    EXPECT_TRUE(equal) << "the second engine under " + how.text(world) + " continues";
    outcomes.add(how, equal ? "equal" : "different");
  }
}

// A model whose parameter shares memory with a parameter of another engine.
void engine_beside(Run& run) {
  const zr::Program program = program_of(run, {"zero0", true});
  Net net("none"), other("none");
  zr::Engine engine(program, net);
  other.last->weight.set_data(net.last->weight.detach());
  std::cout << error_of([&] { zr::Engine second(program, other); }) << std::endl;
}

// A view that a constructor creates inside zr::deferred.
void deferred_view(Run& run) {
  Outcomes outcomes(run);
  for (const SharingMode& how : sharing_modes(run.program.world())) {
    const auto net = zr::deferred([] { return std::make_shared<Net>("view"); });
    const std::string error = error_of([&] {
      zr::Engine engine(program_of(run, how), *net);
      engine.backward(net->loss(run.program.rank()));
    });
    outcomes.add(how, error);
  }
}

// model_aliases.txt names these bodies.
const std::vector<RankBodyOf<Run>> kBodies = [] {
  std::vector<RankBodyOf<Run>> all{
      {"alias_engine_before", engine_before},
      {"alias_engine_beside", engine_beside},
      {"alias_deferred_view", deferred_view},
      {"alias_bf16_view", [](Run& run) { compare(run, "bf16_view", {"train.dtype=bf16"}); }}};
  for (const std::string pattern : {"view",
                                    "view_without_grad",
                                    "detach",
                                    "data",
                                    "chunks",
                                    "second_model",
                                    "flat_parameters",
                                    "flat_base",
                                    "columns",
                                    "overlap",
                                    "blobs",
                                    "part_blob",
                                    "blob_buffer",
                                    "set_data_tie",
                                    "expanded",
                                    "buffer_view",
                                    "buffer_beside",
                                    "buffer_beside_kept",
                                    "tied",
                                    "lstm",
                                    "optimizer",
                                    "held_loss"})
    all.emplace_back("alias_" + pattern, [pattern](Run& run) { compare(run, pattern); });
  return all;
}();

TEST_F(EngineModelTest, TrainsWeightAliasesAsLibtorchDoesOrRejectsThem) { check_outcomes("model_aliases.txt", 40); }

}  // namespace
}  // namespace model_tests
