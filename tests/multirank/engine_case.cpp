// One rank of the engine tests: runs the case named on the command line. If a check fails, it prints the check and
// exits with 1.
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

#include "multirank/engine_run.hpp"

namespace {

using engine_tests::require;
using engine_tests::Run;
using engine_tests::same;

// Trains to the end; the test reads the run folder.
void trains(Run& run) {
  run.build();
  run.train();
}

// Trains once per line of overrides in the file that ENGINE_CASE_LIST names, one Engine after another.
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
  run.model = parity::make(run.program.text("parity.model"), 7 + static_cast<uint64_t>(run.program.rank()));
  auto mean = run.model->named_buffers()["batch_norm.running_mean"];
  mean.fill_(3 + run.program.rank());
  run.engine = std::make_unique<zr::Engine>(run.program, *run.model);
  require(mean.eq(3).all().item<bool>(), "the model has rank 0's buffers");
  const auto expected = parity::make(run.program.text("parity.model"), 7);
  for (const auto& item : expected->named_parameters())
    require(same(run.engine->get(item.key()), item.value()), "get(" + item.key() + ") returns rank 0's value");
  for (const auto& item : expected->named_parameters())
    require(same(run.model->named_parameters()[item.key()], item.value()),
            "the model's " + item.key() + " has rank 0's value");
}

void gets_and_sets(Run& run) {
  run.build();
  run.micro_step();
  const auto moment = run.engine->get("twice.weight", zr::TensorKind::state, "exp_avg");
  const auto gradient = run.engine->get("twice.weight", zr::TensorKind::gradient);
  require(torch::allclose(moment, gradient * 0.1, 1e-5, 1e-9),
          "after one step the first moment is a tenth of the gradient");
  require(gradient.sizes() == torch::IntArrayRef({parity::kWidth, parity::kWidth}),
          "a gradient has the parameter's shape");
  const auto value =
      torch::arange(parity::kWidth * parity::kWidth, torch::kFloat).view({parity::kWidth, parity::kWidth}) / 7;
  run.engine->set("twice.weight", zr::TensorKind::value, value);
  require(same(run.engine->get("twice.weight"), value), "get() returns the value that was set");
  require(same(run.model->named_parameters()["twice.weight"].to(torch::kFloat),
               value.to(run.model->named_parameters()["twice.weight"].scalar_type()).to(torch::kFloat)),
          "the model computes with the value that was set");
  run.engine->set("twice.weight", zr::TensorKind::state, value * 2, "exp_avg_sq");
  require(same(run.engine->get("twice.weight", zr::TensorKind::state, "exp_avg_sq"), value * 2),
          "get() returns the state that was set");
  require(same(run.engine->get("head.weight"), run.engine->get("embedding.weight")),
          "a tied weight has two names and one value");
}

void skips_non_finite(Run& run) {
  run.build();
  run.micro_step();
  const auto hash = run.engine->weights_hash();
  const auto moment = run.engine->get("twice.weight", zr::TensorKind::state, "exp_avg");
  // Only the last rank's loss is not finite.
  const bool mine = run.engine->rank() == run.engine->world() - 1;
  auto loss = run.model->loss(1, run.engine->micro_index());
  run.engine->backward(mine ? loss * std::numeric_limits<float>::infinity() : loss);
  run.engine->step();
  require(run.engine->weights_hash() == hash,
          "a non-finite gradient on one rank leaves the weights of all ranks unchanged");
  require(same(run.engine->get("twice.weight", zr::TensorKind::state, "exp_avg"), moment),
          "a non-finite gradient leaves the optimizer state unchanged");
  run.micro_step();
  require(run.engine->weights_hash() != hash, "the next step updates the weights again");
}

// From the third step on, the last rank's loss is NaN.
void never_finite(Run& run) {
  run.build();
  while (!run.engine->done()) {
    const bool nan_loss = run.engine->step_index() >= 2 && run.engine->rank() == run.engine->world() - 1;
    const auto loss = run.model->loss(run.engine->step_index(), run.engine->micro_index());
    run.engine->backward(nan_loss ? loss * std::numeric_limits<float>::quiet_NaN() : loss);
    run.engine->step();
  }
}

// Every rank's gradients are finite, but their sum over ranks is not.
void sum_not_finite(Run& run) {
  run.build();
  while (!run.engine->done()) {
    run.engine->backward((run.model->named_parameters()["scalar"].to(torch::kFloat) * 3e38).sum());
    run.engine->step();
  }
}

void keeps_untouched(Run& run) {
  run.build();
  const auto before = run.engine->get("unused");
  run.train();
  require(same(run.engine->get("unused"), before), "weight decay does not change a parameter that no micro-batch used");
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
          "evaluation restores the random state");
  require(run.engine->mean(run.engine->rank()) == (run.engine->world() - 1) / 2.0, "mean() averages over ranks");
}

// Prints one hash of everything that get() returns after two steps.
void tells_all(Run& run) {
  run.build();
  while (run.engine->step_index() < 2) run.micro_step();
  std::string bytes;
  const auto add = [&](const torch::Tensor& t) {
    bytes.append(static_cast<const char*>(t.data_ptr()), static_cast<std::size_t>(t.numel()) * 4);
  };
  for (const auto& item : run.model->named_parameters()) {
    add(run.engine->get(item.key()));
    if (!item.value().requires_grad()) continue;
    add(run.engine->get(item.key(), zr::TensorKind::gradient));
    for (const char* slot : {"exp_avg", "exp_avg_sq"}) add(run.engine->get(item.key(), zr::TensorKind::state, slot));
  }
  if (run.engine->rank() == 0) std::cout << "all " << bytes.size() << " " << std::hash<std::string>()(bytes) << "\n";
}

// A skipped step changes nothing that later steps depend on: no optimizer state, no step count, no schedule.
void skips_without_trace(Run& run) {
  std::vector<std::string> hashes;
  for (const bool skips : {true, false}) {
    run.build();
    run.micro_step();
    if (skips) {
      run.engine->backward(run.model->loss(9, run.engine->micro_index()) * std::numeric_limits<float>::quiet_NaN());
      run.engine->step();
    }
    run.engine->backward(run.model->loss(1, run.engine->micro_index()));
    run.engine->step();
    hashes.push_back(run.engine->weights_hash());
    run.engine.reset();
  }
  require(hashes[0] == hashes[1], "a run with a skipped step ends with the same weights as a run without it");
}

// One step of plain SGD: every parameter is updated with its group's learning rate and weight decay, bit-exactly.
void groups(Run& run) {
  run.build();
  std::map<std::string, torch::Tensor> before;
  for (const auto& item : run.model->named_parameters()) before[item.key()] = run.engine->get(item.key()).clone();
  run.micro_step();
  const double lr = run.program.number("optimizer.lr");
  for (const auto& [name, old] : before) {
    if (!run.model->named_parameters()[name].requires_grad() || name == "unused" || name == "head.weight") continue;
    const bool bias = name.size() > 5 && name.substr(name.size() - 5) == ".bias", tied = name == "embedding.weight";
    auto gradient = run.engine->get(name, zr::TensorKind::gradient);
    if (!bias) gradient = gradient + old * 0.1;  // optimizer.sgd.weight_decay; the group of biases sets 0
    require(same(run.engine->get(name), old - gradient * static_cast<float>(lr * (bias   ? 0.5
                                                                                  : tied ? 0.25
                                                                                         : 1.0))),
            name + " is updated with its group's learning rate and weight decay");
  }
}

// Trains until `rank` runs out of data: at that step and micro-batch it leaves the loop.
void until(Run& run, int rank, int64_t step, int64_t micro) {
  run.build();
  while (!run.engine->done() && !(run.engine->rank() == rank && run.engine->step_index() == step &&
                                  run.engine->micro_index() / run.engine->world() == micro))
    run.micro_step();
}
void ends_early(Run& run) { until(run, run.program.world() - 1, 2, 0); }
void ends_early_first(Run& run) { until(run, 0, 2, 0); }
void ends_early_inside(Run& run) { until(run, run.program.world() - 1, 2, 1); }

// All ranks run out of data after the same step.
void finishes(Run& run) {
  run.build();
  while (run.engine->step_index() < 2) run.micro_step();
  run.engine->finish();
}

// Trains two models with two Engines at the same time.
void two_at_once(Run& run) {
  run.build();
  auto overrides = std::vector<std::string>(run.arguments.begin() + 1, run.arguments.end());
  overrides.insert(overrides.end(), {"job.name=second", "strategy=zero0"});
  Run second(run.arguments[0], overrides);
  second.build();
  for (int i = 0; i < 3; ++i) {
    run.micro_step();
    second.micro_step();
  }
  require(run.engine->weights_hash() == second.engine->weights_hash(), "two Engines do not affect each other");
  run.engine.reset();
  second.micro_step();
  require(second.engine->step_index() == 4, "one Engine continues after the other is destroyed");
}

// The last rank throws after one step.
void fails_alone(Run& run) {
  run.build();
  run.micro_step();
  if (run.program.rank() == run.program.world() - 1) throw std::runtime_error("the data of this rank is corrupt");
  run.train();
}

// Writes the loss of every micro-batch, ordered by micro_index, to the file "losses" in the run folder.
void tells_losses(Run& run) {
  run.build();
  std::vector<double> all;
  while (!run.engine->done()) {
    const auto loss = run.model->loss(run.engine->step_index(), run.engine->micro_index());
    // One rank at a time: mean() of its loss and zeros, times the world size.
    for (int rank = 0; rank < run.engine->world(); ++rank)
      all.push_back(run.engine->mean(rank == run.engine->rank() ? loss.item<double>() : 0) * run.engine->world());
    run.engine->backward(loss);
    run.engine->step();
  }
  if (run.engine->rank() != 0) return;
  std::ofstream out(run.program.text("job.runs") + "/" + run.program.text("job.name") + "/losses");
  out.precision(17);
  for (const double loss : all) out << loss << "\n";
}

void validates(Run& run) {
  run.build();
  run.train();
  run.engine->validation(1.5);
}

void tells_threads(Run& run) {
  run.build();
  if (run.engine->rank() == 0) std::cout << "threads " << at::get_num_threads() << std::endl;
}

// A block that is recomputed in backward by a nested backward, as activation checkpointing does. Its weight is also
// used outside the block.
struct Again : torch::autograd::Function<Again> {
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& x, const torch::Tensor& w) {
    ctx->save_for_backward({x, w});
    return torch::linear(x, w);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradient) {
    const auto saved = ctx->get_saved_variables();
    const torch::AutoGradMode on(true);
    torch::Tensor x = saved[0].detach().requires_grad_();
    torch::autograd::backward({torch::linear(x, saved[1])}, {gradient[0]});
    return {x.grad(), torch::Tensor()};
  }
};
struct Nested : parity::Model {
  Nested() { line = register_module("line", torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false))); }
  torch::Tensor loss(int64_t step, int64_t m) override {
    const auto x = parity::draw(step, m, 9, {parity::kSamples, 8}).to(torch::kFloat);
    return Again::apply(torch::tanh(line(x)), line->weight).square().mean();
  }
  torch::nn::Linear line{nullptr};
};
void backward_in_backward(Run& run) {
  torch::manual_seed(7);
  const auto nested = std::make_shared<Nested>();
  run.model = nested;
  zr::Engine engine(run.program, *run.model);
  const auto weight = engine.get("line.weight").clone().requires_grad_();
  const auto x = parity::draw(0, 0, 9, {parity::kSamples, 8}).to(torch::kFloat);
  torch::linear(torch::tanh(torch::linear(x, weight)), weight).square().mean().backward();
  engine.backward(run.model->loss(0, 0));
  engine.step();
  require(torch::allclose(engine.get("line.weight", zr::TensorKind::gradient), weight.grad(), 1e-5, 1e-7),
          "the gradient is the sum over both uses of the weight");
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
  run.engine->get("twice.weight", zr::TensorKind::state, "momentum");
}
void another_model(Run& run) {
  if (run.program.rank() == 1)
    run.model = std::make_shared<parity::Tiny>();
  else
    run.model = parity::make("everything", 7);
  zr::Engine engine(run.program, *run.model);
}

// Compares twenty steps of AdamW on one rank with torch::optim::AdamW.
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
  std::cout << "after " << run.engine->steps()
            << " steps: largest difference / largest weight = " << difference / largest << std::endl;
  require(difference <= 1e-6 * largest, "AdamW differs from torch::optim::AdamW by at most 1e-6 of the largest weight");
}

const engine_tests::Cases kCases{{"trains", trains},
                                 {"trains_list", trains_list},
                                 {"takes_rank_zero", takes_rank_zero},
                                 {"gets_and_sets", gets_and_sets},
                                 {"skips_non_finite", skips_non_finite},
                                 {"never_finite", never_finite},
                                 {"sum_not_finite", sum_not_finite},
                                 {"keeps_untouched", keeps_untouched},
                                 {"evaluates", evaluates},
                                 {"ends_early", ends_early},
                                 {"ends_early_first", ends_early_first},
                                 {"ends_early_inside", ends_early_inside},
                                 {"finishes", finishes},
                                 {"fails_alone", fails_alone},
                                 {"two_at_once", two_at_once},
                                 {"tells_threads", tells_threads},
                                 {"tells_losses", tells_losses},
                                 {"validates", validates},
                                 {"tells_all", tells_all},
                                 {"skips_without_trace", skips_without_trace},
                                 {"groups", groups},
                                 {"backward_in_backward", backward_in_backward},
                                 {"backward_outside", backward_outside},
                                 {"backward_twice", backward_twice},
                                 {"step_without_backward", step_without_backward},
                                 {"loss_of_many", loss_of_many},
                                 {"no_such_parameter", no_such_parameter},
                                 {"no_such_state", no_such_state},
                                 {"another_model", another_model},
                                 {"follows_torch_adamw", follows_torch_adamw}};

}  // namespace

int main(int argc, char** argv) { return engine_tests::run_case(argc, argv, kCases); }
