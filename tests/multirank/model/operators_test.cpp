// Every way to use a parameter in forward gives the values and gradients of plain libtorch.
#include <algorithm>
#include <cstdlib>
#include <map>

#include "multirank/model/operators/cases.hpp"
#include "multirank/model/sharded_parameters.hpp"
#include "simulators/sim_device/move_to.hpp"

namespace {

using namespace sharded_tests;
using operators::Case;

using torch::Tensor;

constexpr int kSteps = 3;  // the first step records the execution order, later steps follow it
constexpr int kCases = 71;

// The cases that the simulated accelerator cannot run, and why: tests/simulators/sim_device/README.md, "Limits".
const std::map<std::string, std::string> kNotOnSim{
    {"embedding with sparse gradients", "the device has no sparse tensors"},
    {"lstm with projection", "the device has no LSTM with projections"},
    {"gru of both directions", "the device has no GRU"},
    {"module->clone()", "libtorch's clone() works on its own devices alone"}};

std::string bytes(const Tensor& tensor) {
  if (!tensor.defined()) return "";
  const Tensor plain = (tensor.is_sparse() ? tensor.to_dense() : tensor).detach().to(torch::kCPU).contiguous();
  return {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()};
}

struct Seen {
  at::Device device = at::kCPU;
  std::vector<std::pair<std::string, std::string>> values;  // description, and the bytes of the tensor
  void add(const std::string& what, const Tensor& tensor) { values.emplace_back(what, bytes(tensor)); }
};

std::pair<Tensor, Tensor> forward(const Case& one, torch::nn::Module& module, int step, Seen& seen) {
  torch::manual_seed(7 + step);
  const Tensor x = torch::randn(one.input).to(seen.device).requires_grad_(true);
  Tensor loss;
  int i = 0;
  for (const Tensor& y : one.run(module, x)) {
    seen.add("output " + std::to_string(i++) + " of step " + std::to_string(step), y);
    if (!y.requires_grad()) continue;
    const Tensor value = y.to(torch::kFloat);
    const Tensor part = (value * value.detach().cos()).sum();
    loss = loss.defined() ? loss + part : part;
  }
  return {loss, x};
}

Seen plainly(const Case& one, const at::Device& device) {
  Seen seen{device, {}};
  torch::manual_seed(3);
  const auto module = one.make();
  zr::test::sim::move_to(*module, device);
  for (int step = 0; step < kSteps; ++step) {
    const auto [loss, x] = forward(one, *module, step, seen);
    for (auto& parameter : module->parameters()) parameter.mutable_grad() = Tensor();
    loss.backward();
    seen.add("gradient of the input", x.grad());
    for (const auto& item : module->named_parameters()) {
      const Tensor gradient = item.value().grad();
      seen.add("gradient of " + item.key(), gradient.defined() ? gradient : torch::zeros_like(item.value()));
    }
  }
  return seen;
}

Seen sharded(const Case& one, const std::string& toml, std::vector<std::string> overrides) {
  Seen seen;
  torch::manual_seed(3);
  const auto module = one.make();
  if (!one.overrides.empty()) overrides.push_back(one.overrides);
  zr::Engine engine(zr::Program(toml, overrides), *module);
  seen.device = engine.device();
  for (int step = 0; step < kSteps; ++step) {
    const auto [loss, x] = forward(one, *module, step, seen);
    engine.backward(loss);
    engine.step();
    seen.add("gradient of the input", x.grad());
    for (const auto& item : module->named_parameters())
      seen.add("gradient of " + item.key(), engine.get(item.key(), zr::TensorKind::gradient));
  }
  return seen;
}

std::string difference(const Seen& plain, const Seen& shard) {
  for (std::size_t i = 0; i < plain.values.size(); ++i) {
    if (i >= shard.values.size()) return "ends early";
    const auto& [what, is] = plain.values[i];
    if (shard.values[i].second != is) return what + " differs";
  }
  return "";
}

// Runs every case with a sharded module, then with a plain one on the same device.
struct Operators {
  std::string toml;
  std::vector<std::string> overrides;
};

RANK_BODY(compares_with_libtorch, Operators) {
  at::set_num_threads(1);
  const bool on_sim = std::any_of(run.overrides.begin(), run.overrides.end(),
                                  [](const std::string& each) { return each.starts_with("job.device=sim"); });
  at::Device device = at::kCPU;
  for (const auto* list : {&operators::layers(), &operators::tensors(), &operators::autograds()})
    for (const Case& one : *list) {
      SCOPED_TRACE(one.name);
      if (const auto why = kNotOnSim.find(one.name); on_sim && why != kNotOnSim.end()) {
        EXPECT_ANY_THROW(plainly(one, device)) << "the case need not be left out";
        std::cout << "left out: " << one.name << ", because " << why->second << std::endl;
        continue;
      }
      const Seen shard = sharded(one, run.toml, run.overrides);
      device = shard.device;
      EXPECT_EQ(device.is_privateuseone(), on_sim);
      const std::string wrong = difference(plainly(one, device), shard);
      EXPECT_EQ(wrong, "");
      if (wrong.empty()) std::cout << "ok " << one.name << std::endl;
    }
}

int lines_that_start(const std::string& output, const std::string& with) {
  int count = 0;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) count += line.starts_with(with);
  return count;
}

class OperatorsTest : public ShardedParametersTest, public testing::WithParamInterface<std::tuple<std::string, int>> {};

TEST_P(OperatorsTest, MatchPlainLibtorch) {
  const auto& [name, ranks] = GetParam();
  const Result result =
      launch(ranks, compares_with_libtorch,
             "strategy.use=" + name.substr(0, 5) + (name.size() > 5 ? " communicator.share_weights=true" : ""));
  EXPECT_EQ(result.code, 0) << result.output;
  int dense = 0;
  std::istringstream lines(result.output);
  for (std::string line; std::getline(lines, line);)
    dense += line.find("the sparse gradient of 'weight' is converted to dense") != line.npos;
  EXPECT_EQ(lines_that_start(result.output, "ok "), kCases) << "cases of rank 0";
  EXPECT_EQ(dense, 1) << "reported once, not once per step or per rank";
}

// The fast tests: without sharding, on shared weights of zero1, and with sharded parameters on two and four ranks.
const auto strategy_and_ranks = [](const auto& info) {
  return std::get<0>(info.param) + "On" + std::to_string(std::get<1>(info.param));
};
INSTANTIATE_TEST_SUITE_P(Strategies, OperatorsTest,
                         testing::Values(std::tuple("zero0", 1), std::tuple("zero1Shared", 2), std::tuple("zero3", 2),
                                         std::tuple("zero3", 4)),
                         strategy_and_ranks);
INSTANTIATE_TEST_SUITE_P(SLOW_Strategies, OperatorsTest,
                         testing::Values(std::tuple("zero0", 2), std::tuple("zero0", 4), std::tuple("zero1Shared", 1),
                                         std::tuple("zero1Shared", 4), std::tuple("zero3", 1)),
                         strategy_and_ranks);
INSTANTIATE_TEST_SUITE_P(SLOW_Shared, OperatorsTest,
                         testing::Combine(testing::Values("zero2Shared", "zero3Shared"), testing::Values(1, 2, 4)),
                         strategy_and_ranks);

class OperatorsOffloadTest : public ShardedParametersTest,
                             public testing::WithParamInterface<std::tuple<std::string, std::string>> {};

TEST_P(OperatorsOffloadTest, MatchPlainLibtorch) {
  const auto& [strategy, tier] = GetParam();
  const Result result = launch(2, compares_with_libtorch,
                               "strategy.use=" + strategy + " offload.activation_bytes=1B offload.activations=" + tier +
                                   (tier == "nvme" ? " offload.nvme.path=" + folder_.string() : ""));
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(lines_that_start(result.output, "ok "), kCases) << "cases of rank 0";
}

const auto strategy_and_tier = [](const auto& info) { return std::get<0>(info.param) + std::get<1>(info.param); };
INSTANTIATE_TEST_SUITE_P(Tiers, OperatorsOffloadTest, testing::Values(std::tuple("zero3", "nvme")), strategy_and_tier);
INSTANTIATE_TEST_SUITE_P(SLOW_Tiers, OperatorsOffloadTest,
                         testing::Values(std::tuple("zero0", "cpu"), std::tuple("zero0", "nvme"),
                                         std::tuple("zero3", "cpu")),
                         strategy_and_tier);

// On the simulated accelerator of tests/simulators/sim_device, whose streams delay the start of operators at random.
class DeviceOperatorsTest : public OperatorsTest {
 protected:
  void SetUp() override {
    OperatorsTest::SetUp();
    ::setenv("ZR_PLUGIN_PATH", ZR_BUILD_DIR "/tests/plugins", 1);  // the optimizers and the communicator for the device
    ::setenv("ZR_SIM_DELAY_US", "50", 1);
    ::setenv("ZR_SIM_SEED", std::to_string(7 + ::getpid() % 1000).c_str(), 0);  // printed if the test fails
  }
  void TearDown() override {
    for (const char* const name : {"ZR_PLUGIN_PATH", "ZR_SIM_DELAY_US", "ZR_SIM_SEED"}) ::unsetenv(name);
    OperatorsTest::TearDown();
  }
};

TEST_P(DeviceOperatorsTest, MatchPlainLibtorchOnTheDevice) {
  SCOPED_TRACE(std::string("ZR_SIM_SEED=") + std::getenv("ZR_SIM_SEED"));
  const auto& [strategy, ranks] = GetParam();
  const Result result =
      launch(ranks, compares_with_libtorch,
             "strategy.use=" + strategy +
                 " job.device=sim job.device_library=" ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output, testing::HasSubstr("weights, gradients and optimizer states are in memory of the device"));
  EXPECT_EQ(lines_that_start(result.output, "ok "), kCases - 4) << "cases of rank 0";
  EXPECT_EQ(lines_that_start(result.output, "left out: "), 4) << "cases of rank 0";
}

INSTANTIATE_TEST_SUITE_P(Strategies, DeviceOperatorsTest,
                         testing::Combine(testing::Values("zero0", "zero3"), testing::Values(2)), strategy_and_ranks);
INSTANTIATE_TEST_SUITE_P(SLOW_Strategies, DeviceOperatorsTest,
                         testing::Combine(testing::Values("zero1", "zero2"), testing::Values(2)), strategy_and_ranks);
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, DeviceOperatorsTest,
                         testing::Combine(testing::Values("zero0", "zero1", "zero2", "zero3"), testing::Values(1, 4)),
                         strategy_and_ranks);

}  // namespace
