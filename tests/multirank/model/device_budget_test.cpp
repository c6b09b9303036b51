// memory.device_budget on a device: the memory that it limits with the training state on the device and in host memory.
#include <gmock/gmock.h>

#include "multirank/model/device_engine_test.hpp"
#include "support/launch_job.hpp"

namespace {

using namespace engine_tests;
using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kModelOfBudget =
                      " parity.model=everything train.steps=3 job.threads=1 communicator.share_weights=false",
                  kInHostMemory = " offload.gradients=cpu";

RANK_BODY(trains_within_a_budget, Run) {
  run.build();
  run.train();
  print_result(run);
}

// Holds 32 MiB of the device from the second step on, during forward.
RANK_BODY(holds_more_in_the_second_step, Run) {
  run.build();
  while (!run.engine->done()) {
    const auto options = torch::TensorOptions().device(run.engine->device()).dtype(torch::kByte);
    const torch::Tensor more = torch::empty({run.engine->step_index() > 0 ? 32 << 20 : 1}, options);
    run.micro_step();
  }
}

// Has 32 MiB of temporaries of which nothing is left when forward ends.
RANK_BODY(has_temporaries, Run) {
  run.build();
  torch::empty({32 << 20}, torch::TensorOptions().device(run.engine->device()).dtype(torch::kByte));
  run.train();
}

class DeviceBudgetTest : public DeviceEngineTest {
 protected:
  Result train(int ranks, const std::string& overrides, const zr::test::RankBody& body = trains_within_a_budget) {
    return launch(ranks, program(ranks, body, overrides + kModelOfBudget + kDevice));
  }
  // The line with the result of a job that must succeed.
  std::string result_of(int ranks, const std::string& overrides) {
    const auto done = train(ranks, overrides);
    EXPECT_EQ(done.code, 0) << overrides << "\n" << done.output;
    const auto at = done.output.rfind("result ");
    EXPECT_NE(at, std::string::npos) << done.output;
    return at == std::string::npos ? "" : done.output.substr(at, done.output.find('\n', at) - at);
  }
  // Bytes that the budget of the last run had to cover: its plan and its activations, with the state on the device.
  int64_t needed() const {
    int64_t bytes = 0;
    const Json device = summary()["memory"]["device"];
    for (const auto& [kind, of_kind] : device.items())
      bytes += of_kind[kind == "activations" ? "peak" : "planned"].get<int64_t>();
    return bytes;
  }
  static std::string budget(int64_t bytes) { return " memory.device_budget=" + std::to_string(bytes) + "B"; }
};

TEST_F(DeviceBudgetTest, SLOW_SufficientBudgetChangesNothing) {
  for (const std::string strategy : {"strategy=zero2 train.dtype=bf16", "strategy=zero3"})
    for (const std::string& place : {std::string(), std::string(" offload.optimizer=cpu"), kInHostMemory})
      for (const int ranks : {1, 2}) {
        const std::string job = strategy + place;
        const std::string plain = result_of(ranks, job);
        const int64_t peak = summary()["device_peak_bytes"];
        const int64_t enough = place == kInHostMemory ? 2 * peak : needed() * 11 / 10;
        EXPECT_EQ(result_of(ranks, job + budget(enough)), plain) << job << " on " << ranks;
      }
}

TEST_F(DeviceBudgetTest, ActivationsOverTheBudgetEndTheJobAndAreNamed) {
  for (const int ranks : {1, 2}) {
    const std::string job = "strategy=zero2";
    result_of(ranks, job);
    const int64_t activations = summary()["memory"]["device"]["activations"]["peak"];
    ASSERT_GT(activations, 0);
    const auto over = train(ranks, job + budget(needed() - activations / 2));
    EXPECT_EQ(over.code, 2) << over.output;
    EXPECT_THAT(over.output,
                AllOf(HasSubstr("zeroth: error: memory.device_budget is "), HasSubstr(" (command line): rank "),
                      HasSubstr(" held up to "), HasSubstr(" on the device by the end of "),
                      HasSubstr(", in the first step\n"), HasSubstr("  weights      planned "),
                      HasSubstr("  activations  planned      unknown, held "), HasSubstr("  largest: ")));
  }
}

TEST_F(DeviceBudgetTest, ErrorNamesTheStepOfTheExcess) {
  for (const std::string& place : {std::string(), kInHostMemory}) {
    const auto over = train(1, "strategy=zero2" + place + " memory.device_budget=24MiB", holds_more_in_the_second_step);
    EXPECT_EQ(over.code, 2) << over.output;
    EXPECT_THAT(over.output, HasSubstr(" on the device by the end of forward, in step 2\n")) << place;
    EXPECT_THAT(over.output, HasSubstr("  weights      planned ")) << place;
  }
}

TEST_F(DeviceBudgetTest, PeakSinceTheLastCheckCounts) {
  const auto over = train(1, "strategy=zero2 memory.device_budget=24MiB", has_temporaries);
  EXPECT_EQ(over.code, 2) << over.output;
  EXPECT_THAT(over.output, HasSubstr(" on the device by the end of forward, in the first step\n"));
}

TEST_F(DeviceBudgetTest, PlanOverTheBudgetFailsAndItsSuggestionsFit) {
  const std::string job = "strategy=zero2 train.dtype=bf16";
  result_of(1, job);
  const int64_t states = summary()["memory"]["device"]["optimizer"]["planned"];
  int64_t planned = 0;
  const Json device = summary()["memory"]["device"];
  for (const auto& [kind, bytes] : device.items())
    planned += kind == "activations" ? 0 : bytes["planned"].get<int64_t>();
  const std::string limited = job + budget(planned - states / 2);
  const auto over = train(1, limited);
  EXPECT_EQ(over.code, 2) << over.output;
  EXPECT_THAT(over.output, AllOf(HasSubstr("zeroth: error: memory.device_budget is "),
                                 HasSubstr(" (command line), but the plan takes up to "),
                                 HasSubstr(" per rank, without activations\n"), HasSubstr("plan: zero2 + adamw: ")));
  EXPECT_THAT(over.output, HasSubstr("\n  offload.optimizer = \"cpu\" "));
  EXPECT_EQ(train(1, limited + " offload.optimizer=cpu").code, 0);
}

// Without a device: `zeroth plan`.
TEST_F(DeviceBudgetTest, PlanSaysWhatOfTheDeviceIsOverTheBudget) {
  const std::string plan = ZR_BUILD_DIR "/bin/zeroth plan --params 1e6 -n 1 --dtype bf16 job.device=sim strategy=zero2";
  const auto lines = [&](const std::string& more) {
    return shell(plan + more + " 2>&1 | grep -E 'error|saves|moves|no change'").output;
  };
  EXPECT_EQ(lines(" memory.device_budget=16MiB"),
            "zeroth: error: memory.device_budget is 16.00 MiB (command line), but the plan takes up to 21.98 MiB per "
            "rank, without activations\n"
            "  offload.optimizer = \"cpu\"                       saves 11.44 MiB, needs 10.54 MiB\n");
  EXPECT_THAT(lines(" memory.device_budget=8MiB"),
              HasSubstr("saves 20.07 MiB, needs 1.91 MiB\n"
                        "  (each moves the training state to host memory, where the CPU updates it)\n"));
  EXPECT_EQ(lines(kInHostMemory + " memory.device_budget=1MiB"),
            "zeroth: error: memory.device_budget is 1.00 MiB (command line), but the weights on the device take up to "
            "1.91 MiB per rank, without activations\n"
            "no change of strategy, ranks, micro-batch or sizes makes the job fit; raise the budget, or train a "
            "smaller model\n");
  EXPECT_EQ(shell(plan + kInHostMemory + " memory.device_budget=4MiB").code, 0) << "2 bytes per parameter";
}

TEST_F(DeviceBudgetTest, AutomaticPlacementFillsTheDeviceUpToTheBudget) {
  const std::string job = "strategy=zero2 train.dtype=bf16";
  const std::string plain = result_of(1, job);
  const Json all = summary()["memory"]["device"];
  const int64_t states = all["optimizer"]["planned"], limit = needed() - states / 2;
  EXPECT_EQ(result_of(1, job + " offload.optimizer=auto" + budget(limit)), plain);
  const Json split = summary()["memory"];
  EXPECT_LE(needed(), limit);
  EXPECT_GT(split["device"]["optimizer"]["planned"], states / 4);
  EXPECT_GT(split["host"]["optimizer"]["planned"], states / 4);
  // In host memory, the budget of the device does not limit the states.
  const std::string host_job = job + kInHostMemory + " offload.optimizer=auto";
  const int64_t peak = (result_of(1, job + kInHostMemory), summary()["device_peak_bytes"].get<int64_t>());
  EXPECT_EQ(result_of(1, host_job + budget(2 * peak)), plain);
  EXPECT_EQ(summary()["memory"]["device"]["optimizer"]["planned"], states);
}

}  // namespace
