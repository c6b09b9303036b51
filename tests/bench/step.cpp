// A training step of two ranks under zero0 and zero1 beside two independent plain libtorch processes with libtorch's
// fused AdamW, in the same processes, in turns: plain, plain again (A/A), zero0, zero1. `bench_step ROWS.json` starts
// its two ranks itself.
#include <ATen/Parallel.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>

#include "bench/row.hpp"
#include "gpt/model.hpp"
#include "zr/engine.hpp"

namespace {

const gpt::Config kShape{6, 384, 6, 256, 0};
constexpr int64_t kSamples = 4;
constexpr int kRounds = 40, kWarm = 3;

// What a user has without Zeroth: backward, then one fused update over all parameters.
class Plain {
 public:
  Plain() : model_(kShape) {
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
  Sharded(const std::string& toml, const std::string& strategy)
      : program_(toml, {"strategy=" + strategy, "job.name=bench_" + strategy, "train.steps=1000000"}),
        model_(kShape),
        engine_(program_, *model_) {}
  void step(const torch::Tensor& bytes, const torch::Tensor& next) {
    engine_.backward(model_->loss(bytes, next));
    engine_.step();
  }
  zr::Engine& engine() { return engine_; }

 private:
  zr::Program program_;
  gpt::Model model_;
  zr::Engine engine_;
};

void measure(const std::string& toml, const std::string& rows) {
  Sharded zero0(toml, "zero0"), zero1(toml, "zero1");
  Plain plain;
  at::set_num_threads(1);
  const auto bytes = torch::randint(0, 256, {kSamples, kShape.context}, torch::kLong),
             next = torch::randint(0, 256, {kSamples, kShape.context}, torch::kLong);
  // Both ranks start together and end together: the barrier is part of every side.
  const auto timed = [&](const std::function<void()>& step) {
    zero0.engine().mean(0);
    const auto start = std::chrono::steady_clock::now();
    step();
    zero0.engine().mean(0);
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  std::vector<double> a, again, with0, with1;
  for (int round = -kWarm; round < kRounds; ++round) {
    const double times[] = {timed([&] { plain.step(bytes, next); }), timed([&] { zero0.step(bytes, next); }),
                            timed([&] { plain.step(bytes, next); }), timed([&] { zero1.step(bytes, next); })};
    if (round < 0) continue;
    a.push_back(times[0]);
    with0.push_back(times[1]);
    again.push_back(times[2]);
    with1.push_back(times[3]);
  }
  if (zero0.engine().rank() != 0) return;
  const std::vector<zr::bench::Row> table{
      zr::bench::compare("step_plain_a_a", "ms", again, "the same, measured twice", a, 0),
      zr::bench::compare("step_zero0", "ms", with0, "2 plain processes, fused", a, 0.97),
      zr::bench::compare("step_zero1", "ms", with1, "2 plain processes, fused", again, 0.97)};
  for (const auto& row : table) zr::bench::print(row);
  zr::bench::append(rows, table);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  if (!std::getenv("ZR_WORLD"))
    ::execl(ZR_BUILD_DIR "/bin/zeroth", "zeroth", "launch", "-n", "2", "--", argv[0], argv[1],
            static_cast<char*>(nullptr));
  return zr::guarded([&] { measure(ZR_SOURCE_DIR "/tests/bench/bench.toml", argv[1]); });
}
