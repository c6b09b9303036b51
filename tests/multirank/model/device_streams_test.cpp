// Streams that are not libtorch's default one: of an optimizer (tests/support/sim_optimizer/own_stream.cpp), and of the
// program.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <optional>
#include <thread>

#include "multirank/model/device_engine_test.hpp"

namespace {

using namespace engine_tests;

constexpr int kLateMs = 100;

// Ends after updates that nothing waits for.
RANK_BODY(trains_on_late_stream, Run) {
  run.build();
  run.train();
  std::cout << "result " << run.engine->weights_hash() << std::endl;
  std::this_thread::sleep_for(std::chrono::milliseconds(6 * kLateMs));
}

class DeviceStreamsTest : public DeviceEngineTest {
 protected:
  // The hash of the weights of a job on one rank.
  std::string result_of(const std::string& overrides) {
    const auto done = launch(1,
                             program(1, trains_on_late_stream,
                                     "parity.model=everything train.steps=3 communicator.share_weights=false "
                                     "optimizer=" ZR_BUILD_DIR "/tests/plugins/sim/zr_optimizer_own_stream.so " +
                                         overrides),
                             "ZR_SIM_DELAY_US=100 ZR_SIM_SEED=3");
    EXPECT_EQ(done.code, 0) << overrides << "\n" << done.output;
    const bool on_device = done.output.find("optimizer states are in memory of the device") != std::string::npos;
    EXPECT_EQ(on_device, overrides.find("job.device") != std::string::npos) << overrides << "\n" << done.output;
    const auto at = done.output.rfind("result ");
    EXPECT_NE(at, std::string::npos) << done.output;
    return at == std::string::npos ? "" : done.output.substr(at, done.output.find('\n', at) - at);
  }
  const std::string late_ = kDevice + " optimizer.own_stream.late_ms=" + std::to_string(kLateMs);
};

TEST_F(DeviceStreamsTest, UpdatesOnAnOwnStreamHaveTheBitsOfHostMemory) {
  for (const std::string strategy : {"zero0", "zero2", "zero3"})
    EXPECT_EQ(result_of("strategy=" + strategy + late_), result_of("strategy=" + strategy)) << strategy;
}

TEST_F(DeviceStreamsTest, WithoutAWaitTheUpdateIsLate) {
  EXPECT_NE(result_of("strategy=zero2 optimizer.own_stream.waits=false" + late_), result_of("strategy=zero2"));
}

// On the CPU, there is no stream.
std::optional<c10::StreamGuard> on_another_stream() {
  constexpr auto kSim = c10::DeviceType::PrivateUse1;
  if (!c10::impl::hasDeviceGuardImpl(kSim)) return std::nullopt;
  return std::optional<c10::StreamGuard>(
      std::in_place, c10::impl::VirtualGuardImpl(kSim).getStreamFromGlobalPool(c10::Device(kSim, 0)));
}

RANK_BODY(builds_and_trains_on_another_stream, Run) {
  const auto guard = on_another_stream();
  run.build();
  run.train();
  print_result(run);
}

RANK_BODY(grows_on_another_stream, Run) {
  torch::manual_seed(1);
  const auto wide = [] { return torch::nn::Linear(64, 64); };
  torch::nn::Sequential layers(wide(), wide(), wide());
  zr::Engine engine(run.program, *layers);
  const auto guard = on_another_stream();
  const torch::Tensor x = torch::linspace(-1, 1, 8 * 64).reshape({8, 64}).to(engine.device());
  std::ostringstream line;
  line.precision(17);
  while (!engine.done()) {
    if (engine.step_index() == 2) {
      for (int i = 0; i < 2; ++i) layers->push_back(wide());
      engine.refresh();
    }
    engine.backward(layers->forward(x).square().mean());
    engine.step();
    const auto step = engine.last_step();
    line << " " << step.loss << " " << step.gradient_norm << (step.skipped ? " skipped" : "");
  }
  const std::string hash = engine.weights_hash();
  if (engine.rank() == 0) std::cout << "result " << hash << line.str() << std::endl;
}

class ProgramStreamTest : public DeviceEngineTest {
 protected:
  std::string result_of(const zr::test::RankBody& body, const std::string& overrides, int seed = 0) {
    const auto done = launch(1,
                             program(1, body,
                                     "parity.model=everything train.steps=5 job.threads=1 "
                                     "communicator.share_weights=false " +
                                         overrides),
                             "ZR_SIM_DELAY_US=300 ZR_SIM_SEED=" + std::to_string(seed));
    const auto at = done.output.rfind("result ");
    return done.code == 0 && at != std::string::npos ? done.output.substr(at) : done.output;
  }
};

TEST_F(ProgramStreamTest, AnotherStreamHasTheBitsOfTheCpu) {
  for (const zr::test::RankBody& body : {builds_and_trains_on_another_stream, grows_on_another_stream})
    for (const std::string job : {"strategy=zero2", "strategy=zero3", "strategy=zero1 offload.optimizer=cpu",
                                  "strategy=zero1 offload.gradients=cpu"}) {
      const std::string expected = result_of(body, job);
      ASSERT_NE(expected.find("result "), std::string::npos) << expected;
      for (int seed = 0; seed < 2; ++seed)
        EXPECT_EQ(result_of(body, job + kDevice, seed), expected) << job << ", seed " << seed << ", " << body.name();
    }
}

}  // namespace
