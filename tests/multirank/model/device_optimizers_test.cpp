// Optimizers that update memory of the device: their results are those of updates in host memory.
#include "multirank/model/device_engine_test.hpp"

namespace {

using namespace engine_tests;

const std::string kPlain = "optimizer=sgd optimizer.sgd.momentum=0 optimizer.sgd.nesterov=false ",
                  k8Bit = "optimizer=adamw8bit optimizer.adamw8bit.min_8bit_elements=100 ";
// parity.toml has momentum 0.9, Nesterov momentum and weight decay 0.1. The last has two optimizers, both for the
// device.
const std::vector<std::string> kOptimizers{
    kPlain + "optimizer.sgd.weight_decay=0",
    kPlain,
    "optimizer=sgd",
    "optimizer=sgd optimizer.sgd.nesterov=false optimizer.sgd.dampening=0.5",
    k8Bit,
    k8Bit + "'optimizer.groups=[{match=[\"*.bias\"],use=\"sgd\",lr_scale=0.5}]'",
};

RANK_BODY(trains_and_prints_result, Run) {
  run.build();
  run.train();
  std::cout.precision(17);
  std::cout << "result " << run.engine->last_loss() << " " << run.engine->weights_hash() << std::endl;
}

class DeviceOptimizersTest : public DeviceEngineTest {
 protected:
  // The loss and the hash of the weights of a job on one rank. on_device: its training state must be there.
  std::string result_of(const std::string& overrides, bool on_device) {
    const std::string common =
        "parity.model=everything train.steps=6 train.gradient_accumulation=2 train.gradient_clipping=0.5 "
        "communicator.share_weights=false ";
    const auto done = run(1, trains_and_prints_result, common + overrides + (on_device ? kDevice : ""));
    EXPECT_EQ(done.code, 0) << overrides << "\n" << done.output;
    EXPECT_EQ(done.output.find("optimizer states are in memory of the device") != std::string::npos, on_device)
        << overrides << "\n"
        << done.output;
    const auto at = done.output.rfind("result ");
    EXPECT_NE(at, std::string::npos) << done.output;
    return at == std::string::npos ? "" : done.output.substr(at, done.output.find('\n', at) - at);
  }
  void expect_bits_of_host_memory(const std::string& overrides) {
    EXPECT_EQ(result_of(overrides, true), result_of(overrides, false)) << overrides;
  }
};

TEST_F(DeviceOptimizersTest, HaveTheBitsOfHostMemoryInBf16) {
  for (const std::string& optimizer : kOptimizers)
    expect_bits_of_host_memory("strategy=zero2 train.dtype=bf16 " + optimizer);
}

TEST_F(DeviceOptimizersTest, SLOW_HaveTheBitsOfHostMemoryInFp32AndFp16) {
  for (const std::string& optimizer : kOptimizers) {
    expect_bits_of_host_memory("strategy=zero3 " + optimizer);
    expect_bits_of_host_memory("strategy=zero0 train.dtype=fp16 fp16.initial_scale_power=10 " + optimizer);
  }
}

// States that do not have the shape of the parameter are saved from the device and loaded to it too.
TEST_F(DeviceOptimizersTest, StatesResumeOnAnotherDevice) {
  for (const std::string& optimizer : {kOptimizers[2], k8Bit}) {
    const std::string job = "strategy=zero1 train.dtype=bf16 " + optimizer, whole = result_of(job, false);
    for (const bool first_on_device : {true, false}) {
      const std::string dir = " checkpoint.dir=" + (folder_ / "saved").string();
      result_of(job + dir + " checkpoint.every=3 train.steps=3", first_on_device);
      EXPECT_EQ(result_of(job + dir + " checkpoint.resume=true", !first_on_device), whole) << job << first_on_device;
      fs::remove_all(folder_ / "saved");
    }
  }
}

}  // namespace
