// Training state in memory of the device: an optimizer and, for several ranks, a communicator with a library for it.
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>

#include "multirank/model/device_engine_test.hpp"
#include "multirank/parity/features.hpp"
#include "multirank/parity/models.hpp"
#include "zr/parameters.hpp"

namespace {

using namespace engine_tests;
using ::testing::HasSubstr;

class DeviceStateTest : public DeviceEngineTest {
 protected:
  // The first line of the output of a job that must succeed.
  std::string first_line(int ranks, const zr::test::RankBody& body, const std::string& overrides) {
    const auto result = run(ranks, body, overrides + kDevice + " parity.model=everything");
    EXPECT_EQ(result.code, 0) << overrides << "\n" << result.output;
    return result.output.substr(0, result.output.find('\n'));
  }
};

RANK_BODY(makes_an_engine, Run) { run.build(); }

const std::string kSubject = "zeroth: job.device = \"sim\": weights, gradients and optimizer states are in ";

TEST_F(DeviceStateTest, IsOnTheDevicesOfOneRankAndOfSeveral) {
  for (const std::string strategy : {"zero0", "zero1", "zero3"})
    for (const int ranks : {1, 2})
      EXPECT_EQ(first_line(ranks, makes_an_engine, "strategy=" + strategy),
                kSubject + "memory of the device, and " ZR_BUILD_DIR
                           "/tests/plugins/sim/zr_optimizer_adamw.so updates them there");
}

TEST_F(DeviceStateTest, IsInHostMemoryForAReasonThatIsStated) {
  const std::string host = kSubject + "host memory, and the CPU updates them, because ";
  const std::string communicator = ZR_BUILD_DIR "/plugins/zr_communicator_shm.so";
  EXPECT_EQ(first_line(2, makes_an_engine, "strategy=zero1 communicator=" + communicator),
            host + "communicator 'shm' (" + communicator + ") exchanges host memory only");
  EXPECT_EQ(first_line(1, makes_an_engine, "strategy=zero2 optimizer=lamb"),
            host + "optimizer 'lamb' (" ZR_BUILD_DIR "/plugins/zr_optimizer_lamb.so) updates host memory only");
  EXPECT_EQ(first_line(1, makes_an_engine, "strategy=zero2 offload.optimizer=cpu offload.gradients=cpu"),
            host + "offload.gradients or offload.parameters selects a tier for a part");
  EXPECT_EQ(first_line(1, makes_an_engine,
                       "strategy=zero2 train.dtype=bf16 gradients.dtype=bf16 gradients.reduce_dtype=bf16"),
            host + "gradients.dtype is not fp32");
  EXPECT_EQ(first_line(1, makes_an_engine, "strategy=zero2 optimizer=" ZR_BUILD_DIR "/plugins/zr_optimizer_adamw.so"),
            host + "optimizer 'adamw' (" ZR_BUILD_DIR "/plugins/zr_optimizer_adamw.so) updates host memory only");
}

// `zeroth plan` has no device: it says what the job will log. The program prints the same line with its plan.
TEST_F(DeviceStateTest, ThePlanSaysWhereItIs) {
  const std::string where = kSubject.substr(std::string("zeroth: ").size()) +
                            "memory of the device, and " ZR_BUILD_DIR
                            "/tests/plugins/sim/zr_optimizer_adamw.so updates them there\n";
  const std::string plan = ZR_BUILD_DIR "/bin/zeroth plan --params 1e6 job.device=sim";
  const auto planned = shell(plan + " -n 1 strategy=zero2");
  EXPECT_EQ(planned.code, 0) << planned.output;
  EXPECT_THAT(planned.output, HasSubstr("\n  " + where));
  // Only the job knows whether the communicator can use its devices.
  const auto of_ranks = shell(plan + " -n 2 strategy=zero2");
  EXPECT_EQ(of_ranks.code, 0) << of_ranks.output;
  EXPECT_THAT(of_ranks.output, HasSubstr("\n  " + where.substr(0, where.size() - 1) +
                                         ", if communicator 'shm' (" ZR_BUILD_DIR
                                         "/tests/plugins/sim/zr_communicator_shm.so) can use the devices: here it "
                                         "reports none\n"));
  const fs::path plugins = folder_ / "plugins", strategy = "zr_strategy_round_robin.so";
  fs::create_directories(plugins);
  fs::copy(fs::path(ZR_BUILD_DIR "/tests/plugins") / strategy, plugins / strategy);
  fs::copy(ZR_BUILD_DIR "/tests/plugins/sim", plugins / "sim");
  const auto compared = shell("ZR_PLUGIN_PATH=" + plugins.string() + " " + plan + " -n 1 --compare");
  EXPECT_EQ(compared.code, 0) << compared.output;
  const std::string subject = kSubject.substr(std::string("zeroth: ").size());
  EXPECT_THAT(compared.output, HasSubstr("\n  zero2: " + subject + "memory of the device, and "));
  EXPECT_THAT(compared.output, HasSubstr("\n  round_robin: " + subject +
                                         "host memory, and the CPU updates them, "
                                         "because the strategy does not accept memory of the device\n"));
  const auto trained =
      launch(1, program(1, makes_an_engine, "strategy=zero2 parity.model=everything" + kDevice), "ZR_PROGRESS=plain");
  EXPECT_EQ(trained.code, 0) << trained.output;
  EXPECT_THAT(trained.output, HasSubstr("\n  " + where));
}

template <class Function>
Function* function_of_device(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

uint64_t waits() { return function_of_device<uint64_t()>("zr_sim_synchronizations")(); }

// A task that holds the engine's stream. A host that waits for the stream in any way, also by asking for events again
// and again, waits until the task gives up.
class Gate {
 public:
  explicit Gate(at::Device device) {
    void* const stream = function_of_device<void*(int, int)>("zr_sim_stream")(device.index(), 0);
    const auto run = [](void* context) {
      const std::unique_ptr<std::shared_ptr<State>> state(static_cast<std::shared_ptr<State>*>(context));
      (*state)->gave_up = (*state)->opened.get_future().wait_for(kLimit) != std::future_status::ready;
    };
    function_of_device<void(void*, const char*, void (*)(void*), void*)>("zr_sim_enqueue")(
        stream, "gate", run, new std::shared_ptr<State>(state_));
  }
  // Returns whether nothing has waited.
  bool open() {
    state_->opened.set_value();
    return !state_->gave_up;
  }

 private:
  static constexpr std::chrono::seconds kLimit{30};
  struct State {
    std::promise<void> opened;
    std::atomic<bool> gave_up = false;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

// engine.step() reads the losses, which have been copied by then, the sums of the norm blocks and, with several ranks,
// a part of the weights, to compare it: once per 64 KiB of it. The last one also reads the weights, for their hash.
RANK_BODY(counts_waits, Run) {
  run.build();
  for (bool more = !run.engine->done(); more; more = !run.engine->done()) {
    const torch::Tensor loss = run.model->loss(run.engine->step_index(), run.engine->micro_index());
    const uint64_t before = waits();
    run.engine->backward(loss);
    const uint64_t between = waits();
    run.engine->step();
    EXPECT_EQ(between, before);
    if (!run.engine->done()) {
      EXPECT_LE(waits() - between, run.engine->world() == 1 ? 1u : 2u);
    }
  }
}

TEST_F(DeviceStateTest, TheHostWaitsOncePerStep) {
  for (const std::string strategy : {"zero0", "zero1", "zero3"})
    for (const std::string more : {"", " train.dtype=bf16 train.gradient_clipping=0.1"})
      for (const int ranks : {1, 2})
        first_line(ranks, counts_waits, "strategy=" + strategy + more + " train.steps=3 train.gradient_accumulation=2");
  first_line(2, counts_waits, "strategy=zero2 train.steps=3 train.gradient_accumulation=2" + kNccl);
}

RANK_BODY(holds_the_device_during_backward, Run) {
  run.build();
  while (!run.engine->done()) {
    const torch::Tensor loss = run.model->loss(run.engine->step_index(), run.engine->micro_index());
    Gate gate(run.engine->device());
    const uint64_t before = waits();
    run.engine->backward(loss);
    EXPECT_EQ(waits(), before);
    ASSERT_TRUE(gate.open());
    run.engine->step();
  }
}

TEST_F(DeviceStateTest, TheHostDoesNotWaitDuringBackward) {
  const std::string states = " offload.optimizer=cpu", more = " train.steps=2 train.gradient_accumulation=2";
  std::vector<std::pair<int, std::string>> jobs{{2, "strategy=zero2" + more + kNccl + states}};
  for (const std::string strategy :
       {"strategy=zero0", "strategy=zero1 train.dtype=bf16", "strategy=zero2", "strategy=zero3 train.dtype=bf16"}) {
    for (const int ranks : {1, 2}) jobs.emplace_back(ranks, strategy + more + states);
    jobs.emplace_back(2, strategy + more + kNccl);
  }
  for (const auto& [ranks, job] : jobs) {
    first_line(ranks, holds_the_device_during_backward, job);
    if (HasFailure()) return;  // each would take as long as the task waits
  }
}

std::atomic<int> launches = 0;

// The gradients of a bucket are copied into it by one operator.
RANK_BODY(counts_launches, Run) {
  run.build();
  run.micro_step();
  const at::CallbackHandle callback = at::addGlobalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
        launches += std::string(call.name()) == "aten::_foreach_copy_";
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  run.engine->backward(run.model->loss(run.engine->step_index(), run.engine->micro_index()));
  at::removeCallback(callback);
  EXPECT_GE(launches, 1);
  EXPECT_LE(launches, 3) << "13 gradients, of which the buckets have all but a few";
  run.engine->step();
}

TEST_F(DeviceStateTest, TheGradientsOfABucketAreCopiedByOneOperator) {
  for (const std::string strategy : {"zero0", "zero1", "zero2", "zero2 gradients.reduce=last_micro_step"})
    first_line(1, counts_launches, "strategy=" + strategy + " train.steps=2");
}

// Operators of the program, on a stream of its own, see the weights after each update, which is on the engine's stream.
RANK_BODY(trains_on_a_stream, Run) {
  run.build();
  const std::string name = "twice.weight";
  const torch::Tensor weight = run.model->named_parameters()[name];
  const c10::impl::VirtualGuardImpl guard(run.engine->device().type());
  const c10::StreamGuard scope(guard.getNewStream(run.engine->device()));
  while (!run.engine->done()) {
    run.micro_step();
    const torch::Tensor seen = weight.detach().clone();
    EXPECT_TRUE(torch::equal(seen.to(torch::kCPU), run.engine->get(name)));
  }
}

TEST_F(DeviceStateTest, IsUpdatedBeforeTheProgramsStreamContinues) {
  const auto result =
      launch(1, program(1, trains_on_a_stream, "strategy=zero2 train.steps=10 parity.model=everything" + kDevice),
             "ZR_SIM_DELAY_US=2000 ZR_SIM_SEED=5");
  EXPECT_EQ(result.code, 0) << result.output;
}

// Masters, states and gradients read and written by name.
RANK_BODY(reads_and_writes, Run) {
  run.build();
  const std::string name = "twice.weight";
  run.micro_step();
  run.micro_step();
  const torch::Tensor average = run.engine->get(name, zr::TensorKind::state, "exp_avg");
  EXPECT_GT(average.abs().max().item<float>(), 0.0f);
  run.engine->set(name, zr::TensorKind::state, torch::full_like(average, 0.25f), "exp_avg");
  EXPECT_TRUE(torch::equal(run.engine->get(name, zr::TensorKind::state, "exp_avg"), torch::full_like(average, 0.25f)));
  const torch::Tensor value = torch::rand_like(average);
  run.engine->set(name, zr::TensorKind::value, value);
  EXPECT_TRUE(torch::equal(run.engine->get(name), value));
  const torch::Tensor weight = run.model->named_parameters()[name];
  EXPECT_TRUE(torch::equal(weight.detach().to(torch::kCPU), value.to(torch::kBFloat16)));
  run.engine->edit_gradients([](const std::string&, torch::Tensor gradient, int64_t) { gradient.mul_(2); });
  run.micro_step();
  run.micro_step();
  EXPECT_FALSE(torch::equal(run.engine->get(name), value));
}

TEST_F(DeviceStateTest, IsReadAndWrittenByName) {
  first_line(1, reads_and_writes, "strategy=zero2 train.dtype=bf16 train.gradient_accumulation=2 train.steps=4");
}

}  // namespace
