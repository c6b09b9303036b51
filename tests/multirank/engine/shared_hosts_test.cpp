// Weights that the ranks of each of two hosts share, and every way to change them: the results of one host without
// sharing. The states that they share in steps with local gradients. The ranks only pretend to be on two hosts.
#include "multirank/engine/printed_result.hpp"
#include "zr/parameters.hpp"

namespace {

using namespace engine_tests;

// Large enough that a rank of another host could receive a part before it is written.
struct Large : torch::nn::Module {
  Large() {
    torch::NoGradGuard no_grad;
    first = register_module("first", torch::nn::Linear(1500, 1100));
    second = register_module("second", torch::nn::Linear(1500, 1100));
    first->weight.copy_(torch::arange(1500 * 1100).view({1100, 1500}).remainder(977).to(torch::kFloat).div(4096));
    second->weight.copy_(first->weight).mul_(0.5);
    first->bias.copy_(second->weight.select(1, 3));
    second->bias.zero_();
    frozen = register_parameter("frozen", torch::arange(5000).to(torch::kFloat).div(8192), false);
  }
  torch::Tensor loss(const torch::Tensor& x) {
    return (first->forward(x) + second->forward(x)).sum() + (frozen * frozen).sum();
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::Tensor frozen;
};

// All ranks print what they compute with the weights.
void print_use(zr::Engine& engine, Large& model, const char* when) {
  const torch::NoGradGuard no_grad;
  const auto x = torch::arange(1500).to(torch::kFloat).div(1500).view({1, 1500}).to(engine.dtype());
  std::ostringstream text;
  text << "result " << when << " " << std::hexfloat << model.loss(x).item<double>() << " "
       << model.second->forward(x).to(torch::kDouble).sum().item<double>() << " " << engine.weights_hash();
  std::cout << text.str() + "\n" << std::flush;
}

void train_step(Run& run, zr::Engine& engine, Large& model) {
  const auto x = torch::full({2, 1500}, 0.25 + 0.125 * static_cast<double>(run.program.rank())).to(engine.dtype());
  engine.backward(model.loss(x));
  engine.step();
}

RANK_BODY(changes_weights, Run) {
  run.engine.reset();
  torch::manual_seed(3);
  auto model = zr::deferred([] { return std::make_shared<Large>(); });
  zr::Engine engine(run.program, *model);
  print_use(engine, *model, "built");
  train_step(run, engine, *model);
  print_use(engine, *model, "trained");
  const auto values = torch::arange(1500 * 1100).view({1100, 1500}).remainder(53).to(torch::kFloat).div(2048);
  engine.set("second.weight", zr::TensorKind::value, values);
  print_use(engine, *model, "set");
  train_step(run, engine, *model);
  {
    const torch::NoGradGuard no_grad;
    const auto scope = zr::gather(model->parameters());
    model->first->weight.mul_(0.5);
    model->second->bias.add_(0.0625);
    model->frozen.mul_(0.5);
  }
  print_use(engine, *model, "written");
  train_step(run, engine, *model);
  print_use(engine, *model, "trained again");
  const auto frozen = torch::arange(5000).to(torch::kFloat).div(8192).to(engine.dtype()).mul(0.5);
  EXPECT_TRUE(torch::equal(engine.get("frozen"), frozen.to(torch::kFloat)));
}

RANK_BODY(writes_different_values, Run) {
  run.engine.reset();
  auto model = std::make_shared<Large>();
  zr::Engine engine(run.program, *model);
  try {
    {
      const torch::NoGradGuard no_grad;
      const auto scope = zr::gather(model->frozen);
      model->frozen.fill_(static_cast<double>(run.program.rank()));
    }
    for (int i = 0; i < 2; ++i) train_step(run, engine, *model);
  } catch (const std::exception& error) {
    std::cout << "result " << error.what() << "\n" << std::flush;
  }
}

RANK_BODY(trains_with_local_gradients, Run) {
  run.build();
  run.train();
  print_hash(run);
}

class SharedHostsTest : public PrintedResultTest {
 protected:
  // On two hosts with half of the ranks each.
  std::string result_on_hosts(const zr::test::RankBody& body, const std::string& overrides) {
    ::setenv("ZR_TEST_HOSTS", "2", 1);
    const Result done = run(4, body, overrides);
    ::unsetenv("ZR_TEST_HOSTS");
    EXPECT_EQ(done.code, 0) << overrides << "\n" << done.output;
    return results_in(done.output);
  }
  // The lines with "result", which each rank prints.
  static std::string results_in(const std::string& output) {
    std::map<std::string, int> counts;
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);)
      if (const auto at = line.find("result "); at != line.npos) ++counts[line.substr(at)];
    std::string all;
    for (const auto& [line, count] : counts) all += line + " x" + std::to_string(count) + "\n";
    return all;
  }
  static const char* hosts_of(const std::string& strategy) {
    return strategy == "zero3" ? " strategy.zero3.shard_within=host" : "";
  }
};

TEST_F(SharedHostsTest, SLOW_AllHostsHaveWhatTheProgramWrites) {
  for (const auto& [dtype, strategies] :
       {std::pair<std::string, std::vector<std::string>>{"fp32", {"zero1"}}, {"bf16", {"zero2", "zero3"}}}) {
    const std::string keys = "train.dtype=" + dtype + " train.gradient_accumulation=1 strategy=";
    const Result plain = run(4, changes_weights, keys + "zero1 communicator.share_weights=false");
    ASSERT_EQ(plain.code, 0) << plain.output;
    EXPECT_NE(results_in(plain.output).find("result trained again"), std::string::npos);
    for (const std::string& strategy : strategies)
      EXPECT_EQ(result_on_hosts(changes_weights, keys + strategy + hosts_of(strategy)), results_in(plain.output))
          << strategy << " " << dtype;
  }
}

// 1-bit Adam, whose ranks have own copies of the weights if there are several hosts.
TEST_F(SharedHostsTest, StepsWithLocalGradientsHaveOneCopyOfSecondMomentsAndMastersPerHost) {
  const int64_t all = 4 * Sizes::aligned(Sizes().trainable);  // bytes of a state
  for (const std::string dtype : {"fp32", "bf16"}) {
    const std::string keys = "optimizer=onebit_adam optimizer.onebit_adam.freeze_step=2 train.dtype=" + dtype;
    const Result plain = run(4, trains_with_local_gradients, keys + " train.steps=6 strategy=zero0");
    ASSERT_EQ(plain.code, 0) << plain.output;
    const std::string strategy = dtype == "fp32" ? "zero2" : "zero1";
    const std::string job = keys + " strategy=" + strategy;
    EXPECT_EQ(result_on_hosts(trains_with_local_gradients, job + " train.steps=6"), results_in(plain.output)) << job;
    const Json memory = summary()["memory"];
    for (const auto& [tier, kinds] : memory.items())
      for (const auto& [kind, bytes] : kinds.items())
        if (kind != "activations") {
          EXPECT_EQ(bytes["planned"], bytes["peak"]) << job << " " << tier << " " << kind;
        }
    // A quarter of the states, `carry`, a quarter of `server_error`, and half of all second moments.
    const int64_t expected = all / 4 * 2 + all + all / 4 + all / 2;
    EXPECT_NEAR(memory["device"]["optimizer"]["peak"].get<int64_t>(), expected, 4 * 5 * (1024 + 32 * 15)) << job;
    const int64_t masters = dtype == "bf16" ? all / 4 + all / 2 : 0;
    const Json& held = memory["device"];
    EXPECT_NEAR(held.contains("master") ? held["master"]["peak"].get<int64_t>() : 0, masters, 5 * 4 * 1504) << job;
    const std::string checkpoint = " checkpoint.dir=" + (folder_ / (dtype + strategy)).string();
    result_on_hosts(trains_with_local_gradients, job + " train.steps=4 checkpoint.every=4" + checkpoint);
    EXPECT_EQ(result_on_hosts(trains_with_local_gradients, job + " train.steps=6 checkpoint.resume=true" + checkpoint),
              results_in(plain.output))
        << job;
  }
}

TEST_F(SharedHostsTest, DifferentValuesOnTheHostsAreFound) {
  const std::string found = result_on_hosts(writes_different_values, "strategy=zero1 train.gradient_accumulation=1");
  EXPECT_NE(found.find("weights differ between ranks: in 'frozen', elements 0 to 4999, ranks 1, 2 and 3 have "
                       "different values than rank 0"),
            std::string::npos)
      << found;
}

}  // namespace
