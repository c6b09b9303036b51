// The model, the rank's run and the fixture of the tests of sharded parameters.
#pragma once

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <filesystem>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>

#include "support/job_command.hpp"
#include "support/multirank.hpp"
#include "zr/engine.hpp"
#include "zr/parameters.hpp"

namespace sharded_tests {

namespace fs = std::filesystem;
using Result = zr::testing::Outcome;

struct Net : torch::nn::Module {
  Net() {
    in = register_module("first", torch::nn::Linear(48, 64));
    out = register_module("last", torch::nn::Linear(64, 40));
  }
  torch::Tensor loss(const torch::Tensor& x) {
    return out(torch::gelu(in(x.to(in->weight.scalar_type())))).to(torch::kFloat).square().mean();
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
};

struct Run {
  Run(const std::string& toml, const std::vector<std::string>& overrides) : program(toml, overrides) {
    torch::manual_seed(5);
    net = std::make_shared<Net>();
    engine = std::make_unique<zr::Engine>(program, *net);
  }
  void backward() {
    torch::manual_seed(100 + engine->step_index());
    engine->backward(net->loss(torch::randn({4, 48})));
  }
  void step() {
    backward();
    engine->step();
  }
  zr::Program program;
  std::shared_ptr<Net> net;
  std::unique_ptr<zr::Engine> engine;
};

class ShardedParametersTest : public testing::Test {
 public:
  using Run = sharded_tests::Run;

 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("sharded-" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  Result launch(int ranks, const zr::test::RankBody& body, const std::string& overrides) {
    return zr::test::run_job_command(
        ZR_BUILD_DIR "/bin/zeroth launch -n " + std::to_string(ranks) + " -- " + zr::test::rank_command(body.name()) +
            " " ZR_SOURCE_DIR "/tests/multirank/model/operators/operators.toml job.ranks=" + std::to_string(ranks) +
            " job.runs=\"" + folder_.string() + "\" " + overrides,
        fs::current_path());
  }
  // Two ranks.
  Result run(const zr::test::RankBody& body, const std::string& strategy = "zero3", const std::string& overrides = "") {
    return launch(2, body, "optimizer.lr=0.01 strategy.use=" + strategy + " " + overrides);
  }
  // The lines that the program printed on rank 0.
  static std::string said(const Result& result) {
    std::string own;
    std::istringstream lines(result.output);
    for (std::string line; std::getline(lines, line);)
      if (line.rfind("[", 0) != 0 && line.rfind("zeroth:", 0) != 0) own += line + "\n";
    return own;
  }
  // The program must end with a user error whose message contains `text`.
  void rejects(const zr::test::RankBody& body, const std::string& text, const std::string& strategy = "zero3") {
    const Result result = run(body, strategy);
    EXPECT_EQ(result.code == 2 || result.code == 1, true) << body.name() << ": " << result.code << "\n"
                                                          << result.output;
    EXPECT_THAT(result.output, testing::HasSubstr(text)) << body.name();
    EXPECT_THAT(result.output, testing::Not(testing::HasSubstr("SIG"))) << body.name();
  }
  fs::path folder_;
};

inline const std::string kSharded =
    "parameter 'first.weight' is sharded: it has memory only inside operators; read or write it within a "
    "zr::gather(parameter) scope";

inline const std::string kInstead =
    "call torch::load() within a zr::gather(model->parameters()) scope, or engine.set() or engine.load(); call "
    "module->to() and set_data() before the engine is made";

}  // namespace sharded_tests
