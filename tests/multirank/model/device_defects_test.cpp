// Defects that are planted in the simulated device's libtorch backend, as if the engine did not wait: results change,
// so tests that compare results find a wait that is missing.
#include <gmock/gmock.h>

#include "multirank/model/device_engine_test.hpp"
#include "multirank/model/two_streams.hpp"

namespace {

using namespace engine_tests;
using ::testing::AllOf;
using ::testing::HasSubstr;

RANK_BODY(trains_with_defects, Run) {
  run.build();
  run.train();
  print_result(run);
}

// Every operation of the engine then waits for the program's stream, which waits for it.
RANK_BODY(trains_with_defects_on_another_stream, Run) {
  const auto guard = on_another_stream();
  run.build();
  run.train();
  print_result(run);
}

struct Defect {
  std::string name, job;
  bool on_another_stream = false;
};
void PrintTo(const Defect& defect, std::ostream* out) { *out << defect.name << ", " << defect.job; }

class DeviceDefectsTest : public DeviceEngineTest, public ::testing::WithParamInterface<Defect> {
 protected:
  // The line with the result; the exit code and the messages if the job failed.
  std::string result(const std::string& job, const std::string& environment,
                     const zr::test::RankBody& body = trains_with_defects) {
    const auto done = launch(
        1, program(1, body, job + " parity.model=everything train.steps=3 job.threads=1" + kDevice), environment);
    const auto at = done.output.rfind("result ");
    return done.code == 0 && at != std::string::npos ? done.output.substr(at)
                                                     : "code " + std::to_string(done.code) + ": " + done.output;
  }
};

TEST_P(DeviceDefectsTest, IsFoundWithOneOfFortySeeds) {
  const auto& [name, job, on_another_stream] = GetParam();
  const zr::test::RankBody& body = on_another_stream ? trains_with_defects_on_another_stream : trains_with_defects;
  const std::string delays = "ZR_SIM_DELAY_US=2000 ZR_SIM_SEED=", right = result(job, delays + "0", body);
  ASSERT_THAT(right, HasSubstr("result "));
  bool found = false;
  for (int seed = 0; seed < 40 && !found; ++seed) {
    const std::string with_seed = delays + std::to_string(seed);
    found = result(job, "ZR_SIM_BACKEND_DEFECT=" + name + " " + with_seed, body) != right;
    if (found) {
      EXPECT_EQ(result(job, with_seed, body), right) << "without the defect";
    }
  }
  EXPECT_TRUE(found);
}

INSTANTIATE_TEST_SUITE_P(Backend, DeviceDefectsTest,
                         ::testing::Values(Defect{"block", "strategy=zero2 offload.optimizer=cpu"},
                                           Defect{"block", "strategy=zero1 offload.gradients=cpu"},
                                           Defect{"early", "strategy=zero2 offload.optimizer=cpu"},
                                           Defect{"early", "strategy=zero1 offload.gradients=cpu"},
                                           Defect{"reuse", "strategy=zero1 offload.gradients=cpu"},
                                           Defect{"stream", "strategy=zero2 offload.optimizer=cpu"},
                                           Defect{"stream", "strategy=zero1 offload.gradients=cpu"},
                                           Defect{"host", "strategy=zero2 offload.optimizer=cpu"},
                                           Defect{"reuse", "strategy=zero2", true}));

class BothStreamsTest : public DeviceDefectsTest {};

// On streams that run as late as possible, except the one that does not wait.
TEST_F(BothStreamsTest, WaitForEachOther) {
  for (const std::string job :
       {"strategy=zero2", "strategy=zero3 train.dtype=bf16", "strategy=zero1 offload.optimizer=cpu"}) {
    const std::string late = "ZR_SIM_LATE=1", right = result(job, late, trains_with_defects_on_another_stream);
    ASSERT_THAT(right, HasSubstr("result "));
    for (const std::string defect : {"block_engine", "block_program"})
      EXPECT_NE(result(job, late + " ZR_SIM_BACKEND_DEFECT=" + defect, trains_with_defects_on_another_stream), right)
          << job << ", " << defect;
  }
}

// The texts of a device that cannot be used. job.device = "cuda" has the same ones.
class DeviceStartTest : public DeviceDefectsTest {};

TEST_F(DeviceStartTest, SaysThatThereIsNoDevice) {
  EXPECT_THAT(
      result("strategy=zero1", "ZR_SIM_DEVICES=0"),
      AllOf(HasSubstr("code 3: "),
            HasSubstr("job.device = \"sim\": this node has no such device, or its driver is missing or too old; "
                      "check the driver, or set job.device = \"cpu\"")));
}

RANK_BODY(starts, Run) {
  torch::nn::Linear model(2, 2);
  zr::Engine engine(run.program, *model);
}

TEST_F(DeviceStartTest, SaysWhyTheDeviceCannotBeUsed) {
  EXPECT_THAT(
      result("strategy=zero1", "ZR_SIM_BACKEND_DEFECT=driver", starts),
      AllOf(HasSubstr("code 3: "),
            HasSubstr("job.device = \"sim\": the device cannot be used: Found no driver of the simulated device; "
                      "check the driver, or set job.device = \"cpu\"")));
}

}  // namespace
