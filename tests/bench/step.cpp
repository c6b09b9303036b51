// Compares a training step of two ranks under every strategy with plain libtorch steps that use libtorch's fused AdamW.
// Both run in the same processes in alternation, each strategy right after a plain step. `bench_step ROWS.json` starts
// its two ranks itself.
#include <ATen/Parallel.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <vector>

#include "bench/ranks.hpp"
#include "bench/row.hpp"
#include "gpt/model.hpp"
#include "zr/engine.hpp"

namespace {

// The models S and M of tests/bench/peers: 10.8 and 85.4 million parameters.
struct Size {
  std::string name;
  gpt::Config shape;
  int64_t samples;
  int rounds;
};
const Size kSizes[] = {{"", {6, 384, 6, 256, 0}, 4, 24}, {"_85m", {12, 768, 12, 256, 0}, 2, 6}};
constexpr int kWarm = 3;

struct Side {
  std::string name, overrides;
  double target;
  std::string row = "step_" + name;
};
const std::string kCopied = "communicator.share_weights=false";
const std::vector<Side> kSides{
    {"zero0", "", 0.97},
    {"zero1", kCopied, 0.97},
    {"zero2", kCopied, 0.96},
    {"zero3", kCopied, 0.92},
    {"zero1_alias", "communicator.share_weights=true", 0.97},
    {"zero2_alias", "communicator.share_weights=true", 0.97},
    {"zero3_alias", "communicator.share_weights=true", 0.97},
    // All interception of an unmodified model, without any gathers.
    {"zero3_persistent", "communicator.share_weights=false strategy.zero3.persistence_threshold=1000000000", 0.99,
     "interception"}};

// A step without Zeroth: backward, then one fused update over all parameters.
class Plain {
 public:
  explicit Plain(const gpt::Config& shape) : model_(shape) {
    for (auto& p : model_->parameters()) {
      params_.push_back(p);
      means_.push_back(torch::zeros_like(p));
      squares_.push_back(torch::zeros_like(p));
      steps_.push_back(torch::zeros({}));
    }
  }
  void step(const torch::Tensor& bytes, const torch::Tensor& next) {
    model_->loss(bytes, next).backward();
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> grads;
    for (auto& p : params_) grads.push_back(p.grad());
    for (auto& s : steps_) s += 1;
    at::_fused_adamw_(params_, grads, means_, squares_, {}, steps_, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
    for (auto& p : params_) p.mutable_grad() = torch::Tensor();
  }

 private:
  gpt::Model model_;
  std::vector<torch::Tensor> params_, means_, squares_, steps_;
};

class Sharded {
 public:
  Sharded(const std::string& toml, const Side& side, const gpt::Config& shape)
      : program_(toml, overrides(side)), model_(shape), engine_(program_, *model_) {}
  void step(const torch::Tensor& bytes, const torch::Tensor& next) {
    engine_.backward(model_->loss(bytes, next));
    engine_.step();
  }
  void backward(const torch::Tensor& bytes, const torch::Tensor& next) { engine_.backward(model_->loss(bytes, next)); }
  zr::Engine& engine() { return engine_; }

 private:
  static std::vector<std::string> overrides(const Side& side) {
    std::vector<std::string> all{"strategy=" + side.name.substr(0, 5), "job.name=bench_" + side.name,
                                 "train.steps=1000000"};
    std::istringstream words(side.overrides);
    for (std::string word; words >> word;) all.push_back(word);
    return all;
  }
  zr::Program program_;
  gpt::Model model_;
  zr::Engine engine_;
};

void measure(const std::string& toml, const std::string& rows, const Size& size) {
  std::vector<std::unique_ptr<Sharded>> sides;
  for (const Side& side : kSides) sides.push_back(std::make_unique<Sharded>(toml, side, size.shape));
  Plain plain(size.shape);
  at::set_num_threads(1);
  const auto bytes = torch::randint(0, 256, {size.samples, size.shape.context}, torch::kLong),
             next = torch::randint(0, 256, {size.samples, size.shape.context}, torch::kLong);
  // Both ranks start and end together: the barrier is part of every measurement.
  const auto timed = [&](const std::function<void()>& step) {
    sides[0]->engine().mean(0);
    const auto start = std::chrono::steady_clock::now();
    step();
    sides[0]->engine().mean(0);
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  std::vector<double> a, again;
  std::vector<std::vector<double>> ours(sides.size()), theirs(sides.size());
  for (int round = -kWarm; round < size.rounds; ++round) {
    const bool counts = round >= 0;
    for (std::size_t i = 0; i < sides.size(); ++i) {
      const double reference = timed([&] { plain.step(bytes, next); });
      const double time = timed([&] { sides[i]->step(bytes, next); });
      if (counts) theirs[i].push_back(reference);
      if (counts) ours[i].push_back(time);
    }
    const double first = timed([&] { plain.step(bytes, next); }), second = timed([&] { plain.step(bytes, next); });
    if (counts) a.push_back(first);
    if (counts) again.push_back(second);
  }
  std::vector<zr::bench::Row> table{
      zr::bench::compare("step_plain_a_a" + size.name, "ms", again, "the same, repeated", a, 0)};
  for (std::size_t i = 0; i < sides.size(); ++i)
    table.push_back(zr::bench::compare(kSides[i].row + size.name, "ms", ours[i], "2 plain processes, fused", theirs[i],
                                       kSides[i].target));
  // Forward and backward with every parameter intercepted but none gathered (shared weights), compared with the same
  // without interception.
  std::vector<double> intercepted, untouched;
  const auto backward = [&](std::size_t i) {
    const double time = timed([&] { sides[i]->backward(bytes, next); });
    sides[i]->engine().step();
    return time;
  };
  for (int round = 0; round < size.rounds; ++round) {
    untouched.push_back(backward(2));
    intercepted.push_back(backward(5));
  }
  table.push_back(zr::bench::compare("interception_alias" + size.name, "ms", intercepted, "zero2, no interception",
                                     untouched, 0.99));
  if (sides[0]->engine().rank() != 0) return;
  for (const auto& row : table) zr::bench::print(row);
  zr::bench::append(rows, table);
}

}  // namespace

int main(int argc, char** argv) {
  return zr::bench::on_two_ranks(argc, argv, [](const std::string& toml, const std::string& rows) {
    for (const Size& size : kSizes) measure(toml, rows, size);
  });
}
