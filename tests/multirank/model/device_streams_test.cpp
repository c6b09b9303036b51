// Streams that are not libtorch's default one: of an optimizer (tests/simulators/sim_optimizer/own_stream.cpp), and of
// the program.
#include <chrono>
#include <thread>

#include "multirank/model/device_engine_test.hpp"
#include "multirank/model/two_streams.hpp"

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

RANK_BODY(uses_an_activation_on_two_streams, Run) {
  const std::string result = use_an_activation_on_two_streams(run.program);
  std::cout << "result " << result << std::endl;
}

// Closing the communicator frees memory from which the parameters were copied just before.
RANK_BODY(releases_what_another_stream_built, Run) {
  {
    const auto guard = on_another_stream();
    run.build();
  }
  run.train();
  run.engine->release();
  double sum = 0;
  for (const torch::Tensor& each : run.model->parameters())
    sum += each.to(torch::kCPU, torch::kDouble).sum().item<double>();
  std::cout.precision(17);
  std::cout << "result " << sum << std::endl;
}

class ProgramStreamTest : public DeviceEngineTest {
 protected:
  std::string result_of(int ranks, const zr::test::RankBody& body, const std::string& overrides, int seed = 0) {
    const auto done = launch(ranks,
                             program(ranks, body,
                                     "parity.model=everything train.steps=5 job.threads=1 "
                                     "communicator.share_weights=false " +
                                         overrides),
                             "ZR_SIM_DELAY_US=300 ZR_SIM_SEED=" + std::to_string(seed));
    const auto at = done.output.rfind("result ");
    return done.code == 0 && at != std::string::npos ? done.output.substr(at) : done.output;
  }
};

TEST_F(ProgramStreamTest, AnotherStreamHasTheBitsOfTheCpu) {
  struct Job {
    std::string overrides;
    int ranks;
  };
  for (const zr::test::RankBody& body : {builds_and_trains_on_another_stream, grows_on_another_stream})
    for (const auto& [job, ranks] : std::vector<Job>{{"strategy=zero2", 1},
                                                     {"strategy=zero2", 2},
                                                     {"strategy=zero3", 1},
                                                     {"strategy=zero3", 2},
                                                     {"strategy=zero1 offload.optimizer=cpu", 1},
                                                     {"strategy=zero1 offload.gradients=cpu", 1}}) {
      const std::string expected = result_of(ranks, body, job);
      ASSERT_NE(expected.find("result "), std::string::npos) << expected;
      for (int seed = 0; seed < 2; ++seed)
        EXPECT_EQ(result_of(ranks, body, job + kDevice, seed), expected) << job << " on " << ranks << ", seed " << seed;
    }
}

TEST_F(ProgramStreamTest, OffloadedActivationsOfTwoStreamsHaveTheBitsOfTheCpu) {
  const std::string expected = result_of(1, uses_an_activation_on_two_streams, "strategy=zero1");
  ASSERT_NE(expected.find("result "), std::string::npos) << expected;
  for (const std::string more : {"", " offload.activations=cpu offload.activation_bytes=64"})
    for (int seed = 0; seed < 3; ++seed)
      EXPECT_EQ(result_of(1, uses_an_activation_on_two_streams, "strategy=zero1" + more + kDevice, seed), expected)
          << more << ", seed " << seed;
}

TEST_F(ProgramStreamTest, ReleasedParametersHaveTheBitsOfTheCpu) {
  for (const std::string strategy : {"strategy=zero2", "strategy=zero3"}) {
    const std::string expected = result_of(2, releases_what_another_stream_built, strategy);
    ASSERT_NE(expected.find("result "), std::string::npos) << expected;
    for (int seed = 0; seed < 2; ++seed)
      EXPECT_EQ(result_of(2, releases_what_another_stream_built, strategy + kDevice, seed), expected) << strategy;
  }
}

}  // namespace
