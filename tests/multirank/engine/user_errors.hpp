// The model, the rank's run and the fixture of the tests of mistakes that a program makes with zr::Engine.
#pragma once

#include <iostream>

#include "support/engine_test.hpp"
#include "zr/parameters.hpp"

namespace user_errors_tests {

struct Net : torch::nn::Module {
  Net() {
    torch::manual_seed(3);
    left = register_module("left", torch::nn::Linear(6, 7));
    right = register_module("right", torch::nn::Linear(7, 5));
    running = register_buffer("running", torch::zeros({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return right(torch::gelu(left(x))); }
  torch::Tensor loss(int64_t step, int64_t m) {
    torch::manual_seed(100 + step * 10 + m);
    const auto x = torch::randn({4, 6}).to(left->weight.scalar_type());
    return forward(x).to(torch::kFloat).square().mean();
  }
  torch::nn::Linear left{nullptr}, right{nullptr};
  torch::Tensor running;
};

struct Run {
  Run(std::string file, std::vector<std::string> words)
      : toml(std::move(file)),
        overrides(std::move(words)),
        program(toml, overrides,
                {{"parity.model", "everything", "unused here"},
                 {"parity.weighted", false, "unused here"},
                 {"parity.overflows", false, "unused here"}}),
        net(std::make_shared<Net>()),
        engine(std::make_unique<zr::Engine>(program, *net)) {}
  torch::Tensor loss() { return net->loss(engine->step_index(), engine->micro_index()); }
  void backward() { engine->backward(loss()); }
  // Runs backward() and step() for every micro-batch of a step.
  void step() {
    do backward();
    while (!engine->step());
  }
  void make_engine(std::vector<std::string> more = {}) {
    engine.reset();
    more.insert(more.begin(), overrides.begin(), overrides.end());
    const zr::Program next(toml, more,
                           {{"parity.model", "everything", "unused here"},
                            {"parity.weighted", false, "unused here"},
                            {"parity.overflows", false, "unused here"}});
    engine = std::make_unique<zr::Engine>(next, *net);
  }
  bool first() const { return engine->rank() == 0; }
  std::string toml;
  std::vector<std::string> overrides;
  zr::Program program;
  std::shared_ptr<Net> net;
  std::unique_ptr<zr::Engine> engine;
};

// Runs fn, which must throw, and prints the message of the exception.
template <class F>
void says(const char* name, F&& fn) {
  try {
    fn();
    ADD_FAILURE() << name << " does not throw";
  } catch (const std::exception& error) {
    std::cout << name << ": " << error.what() << std::endl;
  }
}

/// zero3 that gathers every weight for each use, so that differences between ranks show in a small model too.
inline const std::string kGathersEachUse =
    "strategy=zero3 communicator.share_weights=false strategy.zero3.max_live_bytes=0B "
    "strategy.zero3.max_reuse_bytes=0B strategy.zero3.prefetch_bytes=0B";
inline const std::vector<std::string> kLayouts{"strategy=zero2 communicator.share_weights=false", "strategy=zero1",
                                               kGathersEachUse};

class UserErrorsTest : public engine_tests::EngineTest {
 public:
  using Run = user_errors_tests::Run;

 protected:
  // The lines that rank 0 printed, without the launcher's.
  static std::string said(const engine_tests::Result& result) {
    std::string own;
    for (const auto& line : result.lines())
      if (line.rfind('[', 0) != 0 && line.rfind("zeroth:", 0) != 0) own += line + "\n";
    return own;
  }
  std::string passes(int ranks, const zr::test::RankBody& body, const std::string& overrides) {
    const engine_tests::Result result = run(ranks, body, overrides);
    EXPECT_EQ(result.code, 0) << body.name() << " on " << ranks << ", " << overrides << "\n" << result.output;
    return said(result);
  }
};

}  // namespace user_errors_tests
