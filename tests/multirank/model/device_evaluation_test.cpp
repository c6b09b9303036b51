// zr::Engine::Evaluation on a device restores the random state of the device and that of the CPU. zr::checkpoint does
// so without an engine too.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>

#include "multirank/model/device_engine_test.hpp"
#include "multirank/parity/models.hpp"
#include "zr/recompute.hpp"

namespace {

using namespace engine_tests;

// The states of the generators of the CPU and of a device.
std::array<torch::Tensor, 2> random_states(const at::Device& device) {
  return {at::globalContext().defaultGenerator(at::kCPU).get_state(),
          at::globalContext().defaultGenerator(device).get_state()};
}

// The losses of evaluations, in training mode so that dropout draws from the generator of the device.
RANK_BODY(evaluates_with_dropout, Run) {
  run.build();
  const at::Device device = run.engine->device();
  while (!run.engine->done()) {
    if (run.program.text("job.name") == "evaluates") {
      const auto before = random_states(device);
      {
        const zr::Engine::Evaluation evaluation(*run.engine);
        EXPECT_FALSE(torch::GradMode::is_enabled());
        torch::rand({17});
        run.model->loss(100, 0);
        const auto drawn = random_states(device);
        EXPECT_FALSE(torch::equal(drawn[0], before[0])) << "the CPU's generator was used";
        EXPECT_FALSE(torch::equal(drawn[1], before[1])) << "the generator of the device was used";
      }
      const auto after = random_states(device);
      EXPECT_TRUE(torch::equal(after[0], before[0])) << "state of the CPU's generator";
      EXPECT_TRUE(torch::equal(after[1], before[1])) << "state of the generator of the device";
    }
    run.micro_step();
  }
  print_result(run);
}

class DeviceEvaluationTest : public DeviceEngineTest {
 protected:
  // The line of print_result().
  std::string result_of(const std::string& overrides) {
    const auto done = run(2, evaluates_with_dropout, "train.steps=3 parity.model=dropout " + overrides + kDevice);
    EXPECT_EQ(done.code, 0) << overrides << "\n" << done.output;
    const auto at = done.output.rfind("result ");
    EXPECT_NE(at, std::string::npos) << done.output;
    return at == std::string::npos ? "" : done.output.substr(at, done.output.find('\n', at) - at);
  }
};

TEST_F(DeviceEvaluationTest, LeavesTrainingWithDropoutAsItIs) {
  for (const std::string strategy : {"zero0", "zero3"})
    EXPECT_EQ(result_of("strategy=" + strategy + " job.name=evaluates"), result_of("strategy=" + strategy)) << strategy;
}

// Backward of the block runs on libtorch's autograd engine first, and then with zr::checkpoint.
RANK_BODY(recomputes_without_an_engine, Run) {
  const at::Device device("sim:1");
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  const auto block = [](const torch::Tensor& x) { return torch::dropout(x * x, 0.5, true) * x; };
  std::vector<torch::Tensor> gradients;
  for (const bool recomputed : {false, true}) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    generator.set_current_seed(5);
    const torch::Tensor x = torch::ones({100}).to(device).requires_grad_();
    const torch::Tensor y = recomputed ? zr::checkpoint(block, x) : block(x);
    torch::dropout(y, 0.5, true).sum().backward();  // the generator has other numbers when the block runs again
    gradients.push_back(x.grad().to(torch::kCPU));
  }
  EXPECT_TRUE(torch::equal(gradients[0], gradients[1])) << gradients[0] << gradients[1];
}

// On the Meta device, which has no random state.
RANK_BODY(recomputes_shapes, Run) {
  const torch::Tensor x = torch::ones({100}, torch::kMeta).requires_grad_();
  zr::checkpoint([](const torch::Tensor& y) { return (y * y).exp(); }, x).sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
}

class DeviceRecomputeTest : public DeviceEngineTest {};

TEST_F(DeviceRecomputeTest, KeepsTheRandomStateOfADeviceThatNoEngineUses) {
  const auto done = run(1, recomputes_without_an_engine, "strategy=zero1" + kDevice);
  EXPECT_EQ(done.code, 0) << done.output;
}

TEST_F(DeviceRecomputeTest, RunsOnTheMetaDevice) {
  const auto done = run(1, recomputes_shapes, "strategy=zero1");
  EXPECT_EQ(done.code, 0) << done.output;
}

}  // namespace
