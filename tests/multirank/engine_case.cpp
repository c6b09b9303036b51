// One rank of the engine tests: runs the case named on the command line, prints what is wrong and exits 1, or exits 0.
//   engine_case CASE TOML [path=value ...]
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <sstream>

#include "multirank/parity/features.hpp"
#include "zr/engine.hpp"

namespace {

int wrong = 0;
void require(bool holds, const std::string& what) {
  if (holds) return;
  std::cerr << "not so: " << what << std::endl;
  wrong = 1;
}

struct Run {
  Run(const std::string& toml, const std::vector<std::string>& overrides)
      : program(toml, overrides,
                {{"parity.model", "everything", "which model"}, {"parity.weighted", false, "unused here"}}) {
    arguments.push_back(toml);
    arguments.insert(arguments.end(), overrides.begin(), overrides.end());
  }
  std::vector<std::string> arguments;
  zr::Program program;
  std::shared_ptr<parity::Model> model;
  std::unique_ptr<zr::Engine> engine;
  void build(uint64_t seed = 7) {
    model = parity::make(program.text("parity.model"), seed);
    engine = std::make_unique<zr::Engine>(program, *model);
  }
  void micro_step() {
    engine->backward(model->loss(engine->step_index(), engine->micro_index()));
    engine->step();
  }
  void train() {
    while (!engine->done()) micro_step();
  }
};

bool same(const torch::Tensor& a, const torch::Tensor& b) { return torch::equal(a, b); }

// Train to the end: the run folder is what the test reads.
void trains(Run& run) {
  run.build();
  run.train();
}

// The same for every line of overrides in the file that ENGINE_CASE_LIST names, one Engine after another.
void trains_list(Run& run) {
  std::ifstream list(std::getenv("ENGINE_CASE_LIST"));
  for (std::string line; std::getline(list, line);) {
    std::istringstream words(line);
    std::vector<std::string> overrides(run.arguments.begin() + 1, run.arguments.end());
    for (std::string word; words >> word;) overrides.push_back(word);
    Run next(run.arguments[0], overrides);
    trains(next);
  }
}

void takes_rank_zero(Run& run) {
  run.build(7 + static_cast<uint64_t>(run.program.rank()));
  const auto expected = parity::make(run.program.text("parity.model"), 7);
  for (const auto& item : expected->named_parameters())
    require(same(run.engine->get(item.key()), item.value()), "get(" + item.key() + ") is rank 0's");
  for (const auto& item : expected->named_parameters())
    require(same(run.model->named_parameters()[item.key()], item.value()),
            "the model's " + item.key() + " is rank 0's");
}

void gets_and_sets(Run& run) {
  run.build();
  run.micro_step();
  const auto moment = run.engine->get("twice.weight", zr::What::state, "exp_avg");
  const auto gradient = run.engine->get("twice.weight", zr::What::gradient);
  require(torch::allclose(moment, gradient * 0.1, 1e-5, 1e-9),
          "after one step the first moment is a tenth of the gradient");
  require(gradient.sizes() == torch::IntArrayRef({parity::kWidth, parity::kWidth}),
          "a gradient has the parameter's shape");
  const auto value =
      torch::arange(parity::kWidth * parity::kWidth, torch::kFloat).view({parity::kWidth, parity::kWidth}) / 7;
  run.engine->set("twice.weight", zr::What::value, value);
  require(same(run.engine->get("twice.weight"), value), "a value set is the value got");
  require(same(run.model->named_parameters()["twice.weight"].to(torch::kFloat),
               value.to(run.model->named_parameters()["twice.weight"].scalar_type()).to(torch::kFloat)),
          "the model computes with the value set");
  run.engine->set("twice.weight", zr::What::state, value * 2, "exp_avg_sq");
  require(same(run.engine->get("twice.weight", zr::What::state, "exp_avg_sq"), value * 2),
          "a state set is the state got");
  require(same(run.engine->get("head.weight"), run.engine->get("embedding.weight")),
          "a tied weight has two names and one value");
}

void skips_non_finite(Run& run) {
  run.build();
  run.micro_step();
  const auto hash = run.engine->weights_hash();
  const auto moment = run.engine->get("twice.weight", zr::What::state, "exp_avg");
  // One rank's loss alone is not finite.
  const bool mine = run.engine->rank() == run.engine->world() - 1;
  auto loss = run.model->loss(1, run.engine->micro_index());
  run.engine->backward(mine ? loss * std::numeric_limits<float>::infinity() : loss);
  run.engine->step();
  require(run.engine->weights_hash() == hash, "a step with a non-finite gradient on one rank changes no weight on any");
  require(same(run.engine->get("twice.weight", zr::What::state, "exp_avg"), moment), "nor a state");
  run.micro_step();
  require(run.engine->weights_hash() != hash, "the next step moves the weights again");
}

void keeps_untouched(Run& run) {
  run.build();
  const auto before = run.engine->get("unused");
  run.train();
  require(same(run.engine->get("unused"), before), "a parameter that no micro-batch used is not decayed");
}

void evaluates(Run& run) {
  run.build();
  run.micro_step();
  const auto state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  {
    const zr::Engine::Evaluation evaluation(*run.engine);
    require(!torch::GradMode::is_enabled(), "gradients are off in evaluation");
    torch::rand({17});
  }
  require(torch::equal(at::globalContext().defaultGenerator(at::kCPU).get_state(), state),
          "evaluation leaves the random state as it was");
  require(run.engine->mean(run.engine->rank()) == (run.engine->world() - 1) / 2.0, "mean is over ranks");
}

// The last rank's data ends after two steps.
void ends_early(Run& run) {
  run.build();
  while (!run.engine->done() && !(run.engine->rank() == run.engine->world() - 1 && run.engine->step_index() == 2))
    run.micro_step();
}

void backward_outside(Run& run) {
  run.build();
  run.model->loss(0, 0).backward();
}
void backward_twice(Run& run) {
  run.build();
  for (int i = 0; i < 2; ++i) run.engine->backward(run.model->loss(0, 0));
}
void step_without_backward(Run& run) {
  run.build();
  run.engine->step();
}
void loss_of_many(Run& run) {
  run.build();
  run.engine->backward(torch::ones({3}, torch::requires_grad()));
}
void no_such_parameter(Run& run) {
  run.build();
  run.engine->get("twice.wieght");
}
void no_such_state(Run& run) {
  run.build();
  run.engine->get("twice.weight", zr::What::state, "momentum");
}
void another_model(Run& run) {
  if (run.program.rank() == 1)
    run.model = std::make_shared<parity::Tiny>();
  else
    run.model = parity::make("everything", 7);
  zr::Engine engine(run.program, *run.model);
}

// Twenty steps of AdamW on one rank, beside torch::optim::AdamW.
void follows_torch_adamw(Run& run) {
  run.build();
  const auto twin = parity::make(run.program.text("parity.model"), 7);
  std::vector<torch::Tensor> parameters;
  for (const auto& p : twin->parameters())
    if (p.requires_grad()) parameters.push_back(p);
  torch::optim::AdamW adamw(parameters,
                            torch::optim::AdamWOptions(run.program.number("optimizer.lr")).weight_decay(0.01));
  for (int64_t step = 0; step < run.engine->steps(); ++step) {
    adamw.zero_grad();
    twin->loss(step, 0).backward();
    adamw.step();
    run.micro_step();
  }
  double largest = 0, difference = 0;
  for (const auto& item : twin->named_parameters()) {
    largest = std::max(largest, item.value().abs().max().item<double>());
    difference = std::max(difference, (item.value() - run.engine->get(item.key())).abs().max().item<double>());
  }
  std::cout << "after " << run.engine->steps() << " steps: " << difference / largest << " of the largest weight"
            << std::endl;
  require(difference <= 1e-6 * largest, "AdamW differs from torch::optim::AdamW by at most 1e-6 of the largest weight");
}

const std::map<std::string, std::function<void(Run&)>> kCases{{"trains", trains},
                                                              {"trains_list", trains_list},
                                                              {"takes_rank_zero", takes_rank_zero},
                                                              {"gets_and_sets", gets_and_sets},
                                                              {"skips_non_finite", skips_non_finite},
                                                              {"keeps_untouched", keeps_untouched},
                                                              {"evaluates", evaluates},
                                                              {"ends_early", ends_early},
                                                              {"backward_outside", backward_outside},
                                                              {"backward_twice", backward_twice},
                                                              {"step_without_backward", step_without_backward},
                                                              {"loss_of_many", loss_of_many},
                                                              {"no_such_parameter", no_such_parameter},
                                                              {"no_such_state", no_such_state},
                                                              {"another_model", another_model},
                                                              {"follows_torch_adamw", follows_torch_adamw}};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || !kCases.count(argv[1])) return 2;
  const int code = zr::guarded([&] {
    Run run(argv[2], {argv + 3, argv + argc});
    kCases.at(argv[1])(run);
  });
  return code ? code : wrong;
}
