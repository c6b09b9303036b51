// Waits for events: each one is missing in turn, on streams that run as late as possible (ZR_SIM_LATE), so that a run
// without a wait that something needs has another result, always.
#include <dlfcn.h>
#include <gmock/gmock.h>

#include <functional>
#include <string_view>

#include "multirank/model/device_engine_test.hpp"
#include "multirank/model/two_streams.hpp"
#include "zr/parameters.hpp"

namespace {

using namespace engine_tests;
using ::testing::HasSubstr;

// Trains, and returns what the results are.
using Train = std::function<std::string(Run&)>;

// Loss, gradient norm, masters, and the weights that operators on the device see.
std::string train_model(Run& run) {
  run.build();
  run.train();
  std::ostringstream line;
  line.precision(17);
  line << run.engine->last_loss() << " " << run.engine->last_grad_norm() << " " << run.engine->weights_hash();
  const auto scope = zr::gather(run.model->parameters());
  std::size_t hash = 0;
  for (const torch::Tensor& each : run.model->parameters()) {
    const torch::Tensor values = each.detach().to(torch::kCPU).contiguous();
    hash = hash * 31 + std::hash<std::string_view>()({static_cast<const char*>(values.data_ptr()), values.nbytes()});
  }
  line << " " << hash;
  return line.str();
}

std::string outcome(Run& run, const Train& train) {
  std::string result;
  try {
    result = train(run);
  } catch (const std::exception& failure) {
    result = failure.what();
  }
  run.engine.reset();
  run.model.reset();
  c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).synchronizeDevice(0);
  return result;
}

// Prints the numbers of the waits without which the outcome is the same. `function`: zr_sim_drop_wait() or
// zr_sim_drop_host_wait().
void drop_each(Run& run, const char* function, const Train& train) {
  run.build();  // loads the device
  run.engine.reset();
  auto* const drop = reinterpret_cast<uint64_t (*)(uint64_t)>(::dlsym(RTLD_DEFAULT, function));
  const std::string right = outcome(run, train);
  drop(0);
  EXPECT_EQ(outcome(run, train), right);
  const uint64_t waits = drop(0);
  std::ostringstream line;
  for (uint64_t wait = 1; wait <= waits; ++wait) {
    drop(wait);
    if (outcome(run, train) == right) line << " " << wait;
  }
  std::cout << "result " << right << "\nwaits " << waits << ", covered by others:" << line.str() << std::endl;
}

std::string train_two_streams(Run& run) { return use_an_activation_on_two_streams(run.program); }

RANK_BODY(drops_each_wait, Run) { drop_each(run, "zr_sim_drop_wait", train_model); }
RANK_BODY(drops_each_wait_of_two_streams, Run) { drop_each(run, "zr_sim_drop_wait", train_two_streams); }
RANK_BODY(drops_each_host_wait, Run) { drop_each(run, "zr_sim_drop_host_wait", train_model); }

class DeviceWaitsTest : public DeviceEngineTest {
 protected:
  void expect_waits(const zr::test::RankBody& body, const std::string& job, const std::string& waits) {
    const auto done = launch(
        1, program(1, body, job + " parity.model=everything train.steps=3 job.threads=1" + kDevice), "ZR_SIM_LATE=1");
    EXPECT_EQ(done.code, 0) << job << "\n" << done.output;
    EXPECT_THAT(done.output, HasSubstr("\nwaits " + waits + "\n")) << job;
  }
};

const std::string kStatesOnCpu = " offload.optimizer=cpu";

// Per step: copies of gradients wait for backward, once per bucket; then, before the update, the streams of both
// directions wait for the computation, which the host has waited for to read the gradient norm; then the computation
// waits for the new weights. DeviceUpdatesTest shows the two in the middle.
TEST_F(DeviceWaitsTest, OfCopiesForTheUpdateOnTheCpu) {
  expect_waits(drops_each_wait, "strategy=zero2" + kStatesOnCpu, "18, covered by others: 4 5 10 11 16 17");
  expect_waits(drops_each_wait, "strategy=zero2 offload.overlap=false" + kStatesOnCpu,
               "9, covered by others: 1 2 4 5 7 8");
  expect_waits(drops_each_wait, "strategy=zero3 train.dtype=bf16 train.gradient_accumulation=2" + kStatesOnCpu,
               "15, covered by others: 3 4 8 9 13 14");
}

// Of the optimizer for the gradients, which the host has waited for, too, and of the computation for the optimizer.
TEST_F(DeviceWaitsTest, OfAnOptimizerWithAStreamOfItsOwn) {
  expect_waits(drops_each_wait,
               "strategy=zero2 optimizer=" ZR_BUILD_DIR "/tests/plugins/sim/zr_optimizer_own_stream.so",
               "6, covered by others: 1 3 5");
}

// Of the program, of autograd and, in the second step, of the second stream for the activation that the first one has
// restored: the 12th. In the other steps, autograd orders the two streams itself.
TEST_F(DeviceWaitsTest, OfTwoStreamsForARestoredActivation) {
  expect_waits(drops_each_wait_of_two_streams, "strategy=zero1 offload.activations=cpu offload.activation_bytes=64",
               "23, covered by others: 1 4 5 6 7 8 9 11 14 15 16 19 20 21 22 23");
}

// Two at the start, before the first operator. Per step: for the gradients, and, from the second on, until the
// weights of the step before are on the device, which the host has waited for by then.
TEST_F(DeviceWaitsTest, OfTheHostForTheUpdateOnTheCpu) {
  expect_waits(drops_each_host_wait, "strategy=zero2" + kStatesOnCpu, "7, covered by others: 1 2 4 6");
  expect_waits(drops_each_host_wait, "strategy=zero3 train.dtype=bf16 train.gradient_accumulation=2" + kStatesOnCpu,
               "7, covered by others: 1 2 4 6");
}

// Each gradient is read when its copy is complete.
TEST_F(DeviceWaitsTest, OfTheHostForGradients) {
  expect_waits(drops_each_host_wait, "strategy=zero1 offload.gradients=cpu", "42, covered by others: 1 2");
}

}  // namespace
