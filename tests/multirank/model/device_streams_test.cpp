// An optimizer that updates memory of the device on a stream of its own (tests/support/sim_optimizer/own_stream.cpp).
#include <chrono>
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

}  // namespace
