// States on tiers while weights and gradients are in memory of the device: the CPU updates them.
#include <ATen/record_function.h>
#include <gmock/gmock.h>

#include <bit>

#include "multirank/model/device_engine_test.hpp"
#include "support/launch_job.hpp"

namespace {

using namespace engine_tests;
using ::testing::HasSubstr;

const std::string kCpuTier = " offload.optimizer=cpu",
                  kDiskTier = " offload.optimizer=nvme offload.nvme.path=" ZR_BUILD_DIR
                              "/tests/swap offload.nvme.block_bytes=4KiB offload.nvme.depth=1";
const std::string kOffloadModel = " parity.model=everything job.threads=1 communicator.share_weights=false";
const std::string kSteps = " train.steps=4 train.gradient_accumulation=2";
constexpr int64_t kSide = 2304;  // of a layer

RANK_BODY(trains_and_prints_hash, Run) {
  run.build();
  run.train();
  print_result(run);
}

// Four layers of 5.3 million parameters: three blocks of gradients.
RANK_BODY(trains_large_layers, Run) {
  torch::manual_seed(1);
  torch::nn::Sequential layers;
  for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(kSide, kSide).bias(i == 0)));
  zr::Engine engine(run.program, *layers);
  const torch::Tensor x = torch::linspace(-1, 1, 2 * kSide).reshape({2, kSide}).to(engine.device());
  for (; !engine.done(); engine.step())
    engine.backward(layers->forward(x.to(layers->parameters()[0].scalar_type())).to(torch::kFloat).square().mean());
  const std::string hash = engine.weights_hash();
  if (engine.rank() == 0) std::cout << "result " << engine.last_loss() << " " << hash << std::endl;
}

// What the program writes to weights and states during training, on the device and on the CPU.
RANK_BODY(writes_to_states, Run) {
  run.build();
  const auto train = [&] {
    for (int i = 0; i < 2; ++i) run.micro_step();
  };
  train();
  const std::string name = "twice.weight";
  torch::Tensor weight = run.model->named_parameters()[name];
  {
    const torch::NoGradGuard no_grad;
    weight.mul_(0.5);
  }
  train();
  const auto average = [&] { return run.engine->get(name, zr::TensorKind::state, "exp_avg"); };
  run.engine->set(name, zr::TensorKind::value, run.engine->get(name) * 2);
  run.engine->set(name, zr::TensorKind::state, average() * 0.25, "exp_avg");
  train();
  const std::string hash = run.engine->weights_hash();
  const double sum = average().sum().item<double>();
  std::cout.precision(17);
  if (run.engine->rank() == 0)
    std::cout << "result " << run.engine->last_loss() << " " << sum << " " << hash << std::endl;
}

class DeviceOffloadTest : public DeviceEngineTest {
 protected:
  // The line of rank 0 with the result of a job. `says`: its output contains this.
  std::string result_of(int ranks, const zr::test::RankBody& body, const std::string& overrides,
                        const std::string& says = "", const std::string& environment = "") {
    const auto done = launch(ranks, program(ranks, body, overrides), environment);
    EXPECT_EQ(done.code, 0) << overrides << "\n" << done.output;
    EXPECT_THAT(done.output, HasSubstr(says)) << overrides;
    const auto at = done.output.rfind("result ");
    EXPECT_NE(at, std::string::npos) << done.output;
    return at == std::string::npos ? "" : done.output.substr(at, done.output.find('\n', at) - at);
  }
};

const std::string kOnDevice = "weights and gradients are in memory of the device, and ";

class DeviceOffloadParityTest : public DeviceOffloadTest {
 protected:
  struct Case {
    std::string job;
    std::vector<std::string> tiers;
  };
  void compare(int ranks, const std::vector<Case>& cases) {
    for (const auto& [job, tiers] : cases) {
      const std::string more = job + kOffloadModel + kSteps + kDevice,
                        plain = result_of(ranks, trains_and_prints_hash, more, "states are in memory of the device");
      for (const std::string& tier : tiers)
        EXPECT_EQ(result_of(ranks, trains_and_prints_hash, more + tier, kOnDevice), plain) << job << tier;
    }
  }
};

TEST_F(DeviceOffloadParityTest, OneRankHasTheBitsOfStatesOnTheDevice) {
  compare(1, {{"strategy=zero0 train.dtype=bf16", {kCpuTier}},
              {"strategy=zero1 train.gradient_clipping=0.1", {kCpuTier + " offload.device_fraction=0.5"}},
              {"strategy=zero2 train.dtype=bf16 train.gradient_clipping=0.1",
               {kCpuTier + " offload.overlap=false", kDiskTier}},
              {"strategy=zero2 gradients.reduce=last_micro_step", {kDiskTier + " offload.overlap=false"}},
              {"strategy=zero3", {kCpuTier}},
              {"strategy=zero3 train.dtype=fp16 fp16.initial_scale_power=30", {kDiskTier}}});
}

TEST_F(DeviceOffloadParityTest, SLOW_TwoRanksHaveTheBitsOfStatesOnTheDevice) {
  compare(2, {{"strategy=zero1 train.gradient_clipping=0.1", {kCpuTier}},
              {"strategy=zero2 train.dtype=bf16", {kDiskTier}},
              {"strategy=zero3 train.dtype=fp16 fp16.initial_scale_power=30", {kCpuTier}}});
}

TEST_F(DeviceOffloadTest, SLOW_LargeParametersAreUpdatedInBlocks) {
  for (const std::string job :
       {"strategy=zero1", "strategy=zero2 train.dtype=bf16", "strategy=zero3 train.dtype=bf16"}) {
    const std::string more = job + " train.steps=3 job.threads=1 optimizer.lr=1e-3";
    const std::string plain = result_of(1, trains_large_layers, more + kDevice);
    for (const std::string& tier : {kCpuTier, kCpuTier + " offload.overlap=false"})
      EXPECT_EQ(result_of(1, trains_large_layers, more + tier + kDevice, kOnDevice), plain) << job << tier;
  }
}

TEST_F(DeviceOffloadTest, SLOW_DelaysOfStreamsChangeNothing) {
  for (const std::string job : {"strategy=zero2 train.dtype=bf16", "strategy=zero3 offload.overlap=false"}) {
    const std::string more = job + kOffloadModel + kSteps + kCpuTier + kDevice;
    const std::string plain = result_of(2, trains_and_prints_hash, more, kOnDevice);
    for (int seed = 0; seed < 3; ++seed)
      EXPECT_EQ(result_of(2, trains_and_prints_hash, more, kOnDevice,
                          "ZR_SIM_DELAY_US=100 ZR_SIM_SEED=" + std::to_string(seed)),
                plain)
          << job << ", seed " << seed;
  }
}

// Copies of gradients begin in backward. The pinned memory is planned, and no more is held.
TEST_F(DeviceOffloadTest, GradientsAreCopiedDuringBackwardIntoPlannedMemory) {
  const std::string job = "strategy=zero2 train.steps=2" + kOffloadModel + kCpuTier + kDevice;
  const int64_t elements = Sizes::aligned(Sizes().trainable);
  result_of(1, trains_and_prints_hash, job, kOnDevice);
  EXPECT_GE(summary()["overlap"]["gradients_early"], Sizes::sum(Sizes().trainable));
  EXPECT_LE(summary()["overlap"]["gradients_early"], elements);
  const Json early = summary()["memory"]["host"]["staging"];
  EXPECT_EQ(early["planned"], early["peak"]);
  EXPECT_EQ(early["planned"], 2 * std::bit_ceil(static_cast<uint64_t>(elements * 4))) << "gradients, and a slot";
  result_of(1, trains_and_prints_hash, job + " offload.overlap=false", kOnDevice);
  EXPECT_EQ(summary()["overlap"]["gradients_early"], 0);
  const Json late = summary()["memory"]["host"]["staging"];
  EXPECT_EQ(late["planned"], late["peak"]);
  EXPECT_EQ(late["planned"], std::bit_ceil(static_cast<uint64_t>(elements * 8))) << "a slot for both";
}

// Each gradient is copied once, also by zero0, whose ranks gather them. A rank updates its part of them, or all.
TEST_F(DeviceOffloadTest, EveryStrategyCopiesEachGradientOnce) {
  for (const std::string strategy : {"zero0", "zero1", "zero3"})
    for (const int ranks : {1, 2}) {
      result_of(ranks, trains_and_prints_hash,
                "strategy=" + strategy + " train.steps=2" + kOffloadModel + kCpuTier + kDevice, kOnDevice);
      const auto early = summary()["overlap"]["gradients_early"].get<int64_t>();
      const int64_t all = Sizes::sum(Sizes().trainable), owned = strategy == "zero0" ? all : all / ranks;
      EXPECT_LE(early, owned + 16 * 1024) << strategy << ranks << " of rank 0; parts begin at norm blocks";
      EXPECT_GE(early, owned / 2) << strategy << ranks;
    }
}

// What a program calls while the gradients of a step are on their way, and steps that are not ordinary.
RANK_BODY(calls_within_steps, Run) {
  run.build();
  const std::string name = "twice.weight";
  double seen = 0;
  const auto step = [&] {
    for (const int64_t before = run.engine->step_index(); run.engine->step_index() == before;) run.micro_step();
    seen += run.engine->get(name, zr::TensorKind::gradient).sum().item<double>();
  };
  step();
  run.engine->backward(run.model->loss(run.engine->step_index(), run.engine->micro_index()));
  run.engine->backward(run.model->loss(run.engine->step_index(), run.engine->micro_index()), 0);  // of weight 0
  {
    const zr::Engine::Evaluation evaluation(*run.engine);
    seen += run.model->loss(0, 0).item<double>();
  }
  run.engine->step();
  run.engine->edit_gradients([](const std::string& parameter, torch::Tensor gradient, int64_t) {
    if (parameter == "twice.weight") gradient.mul_(0.5);
  });
  step();
  run.engine->edit_gradients({});
  run.engine->set_accumulation(1);
  step();
  run.engine->set_accumulation(2);
  step();
  run.engine->refresh();
  step();
  const std::string hash = run.engine->weights_hash();
  const bool prints = run.engine->rank() == 0;
  run.engine->release();
  for (const auto& parameter : run.model->parameters())
    seen += parameter.detach().to(torch::kDouble).sum().item<double>();
  std::cout.precision(17);
  if (prints) std::cout << "result " << seen << " " << hash << std::endl;
}

TEST_F(DeviceOffloadTest, SLOW_CallsWithinStepsHaveTheResultsOfTheCpu) {
  for (const std::string job : {"strategy=zero1 train.dtype=bf16", "strategy=zero2", "strategy=zero3 train.dtype=bf16"})
    for (const int ranks : {1, 2}) {
      const std::string more = job + kOffloadModel + " train.gradient_accumulation=2 train.steps=10";
      EXPECT_EQ(result_of(ranks, calls_within_steps, more + kCpuTier + kDevice, kOnDevice),
                result_of(ranks, calls_within_steps, more))
          << job << ranks;
    }
}

TEST_F(DeviceOffloadTest, OptimizersForTheCpuUpdateTheirGroupsOnTiers) {
  const std::string job = "strategy=zero2 train.dtype=bf16" + kOffloadModel + kSteps, on_tier = kCpuTier + kDevice;
  // 8-bit states have a scale per block.
  const std::string small = " optimizer=adamw8bit optimizer.adamw8bit.min_8bit_elements=100";
  EXPECT_EQ(result_of(2, trains_and_prints_hash, job + small + on_tier, kOnDevice),
            result_of(2, trains_and_prints_hash, job + small));
  const std::string reason = "host memory, and the CPU updates them, because ";
  const auto group = [](const std::string& optimizer) {
    return " 'optimizer.groups=[{match=[\"twice.weight\"],use=\"" + optimizer + "\"}]'";
  };
  result_of(1, trains_and_prints_hash, job + group("lamb") + on_tier,
            reason + "optimizer 'lamb' (" ZR_BUILD_DIR "/plugins/zr_optimizer_lamb.so) adds up sums over parameters");
}

// With weights and gradients on the device, updates on tiers run after backward, and the reason is the right one.
TEST_F(DeviceOffloadTest, PlanNamesWhenStatesOnTiersAreUpdated) {
  const std::string plan = ZR_BUILD_DIR "/bin/zeroth plan --params 1e6 -n 1 job.device=sim strategy=zero3" + kCpuTier +
                           " train.nonfinite=stop";
  const auto update = [&](const std::string& more) { return shell(plan + more + " | grep -E ' update  '").output; };
  EXPECT_EQ(update(""), "  update         states on tiers    after backward: gradients are in memory of the device\n");
  EXPECT_EQ(update(" offload.gradients=auto"), update(""));
  EXPECT_THAT(update(" offload.gradients=cpu"), HasSubstr("states on tiers    during backward\n"));
  // Also not if the plan of a rank has no states on a tier, as that of rank 0 here.
  const std::string job = "strategy=zero1 parity.model=empty_shard job.threads=1" + kSteps + kDevice;
  EXPECT_EQ(result_of(3, trains_and_prints_hash, job + kDiskTier,
                      kOnDevice + "the CPU updates the optimizer states on tiers"),
            result_of(3, trains_and_prints_hash, job));
}

TEST_F(DeviceOffloadTest, WritesOfTheProgramReachMastersAndStates) {
  for (const std::string job : {"strategy=zero1 train.dtype=bf16", "strategy=zero3 train.dtype=bf16", "strategy=zero2"})
    for (const int ranks : {1, 2}) {
      const std::string more = job + kOffloadModel + " train.steps=6";
      const std::string plain = result_of(ranks, writes_to_states, more);
      EXPECT_EQ(result_of(ranks, writes_to_states, more + kCpuTier + kDevice, kOnDevice), plain) << job << ranks;
    }
}

// Checkpoints do not depend on where the states are.
TEST_F(DeviceOffloadTest, ResumesWithStatesOnTheCpuTheDeviceAndTiers) {
  const std::string job = "strategy=zero2 train.dtype=bf16" + kOffloadModel, two = " train.gradient_accumulation=2",
                    dir = (folder_ / "saved").string();
  const std::string whole = result_of(1, trains_and_prints_hash, job + two + " train.steps=6");
  const std::string places[] = {"", kDevice, kCpuTier + kDevice, kDiskTier + kDevice};
  for (std::size_t i = 0; i < std::size(places); ++i) {
    const std::string folder = " checkpoint.dir=" + dir + std::to_string(i),
                      &later = places[(i + 1) % std::size(places)];
    const bool async = i % 2 == 1;
    result_of(
        1, trains_and_prints_hash,
        job + places[i] + two + folder + " train.steps=3 checkpoint.every=3" + (async ? " checkpoint.async=true" : ""));
    EXPECT_EQ(result_of(2, trains_and_prints_hash,
                        job + later + folder + " train.steps=6 train.gradient_accumulation=1 checkpoint.resume=true"),
              whole)
        << places[i] << " then " << later;
  }
}

TEST_F(DeviceOffloadTest, IsPlanned) {
  const std::string plan = ZR_BUILD_DIR "/bin/zeroth plan -n 1 job.device=sim strategy=zero2" + kCpuTier;
  const auto lines = [&](const std::string& more) {
    return shell(plan + more + " | grep -E 'host memory|update|job'");
  };
  EXPECT_EQ(lines(" --params 1e6").output,
            "  job.device = \"sim\": weights and gradients are in memory of the device, and the CPU updates the "
            "optimizer states on tiers\n"
            "  update         states on tiers    after backward: gradients are in memory of the device\n"
            "  host memory    communicator                                                  64.00 KiB\n"
            "  host memory    gradients and new weights                                      8.00 MiB\n");
  EXPECT_THAT(lines(" --params 1e6 offload.device_fraction=0.5").output,
              HasSubstr("are in memory of the device, and " ZR_BUILD_DIR
                        "/tests/plugins/sim/zr_optimizer_adamw.so updates a part of the optimizer states there, the "
                        "CPU those on tiers\n"));
  EXPECT_THAT(lines(" --params 1e6 checkpoint.dir=c checkpoint.async=true").output,
              HasSubstr("  host memory    a part of a checkpoint                                         4.00 MiB\n"));
  EXPECT_THAT(lines(" --params 1e8").output,
              HasSubstr("gradients and new weights                                    480.00 MiB\n"));
  EXPECT_THAT(lines(" --params 1e8 offload.overlap=false").output,
              HasSubstr("gradients and new weights                                    192.00 MiB\n"));
  const auto over = shell(plan + " --params 1e8 optimizer=sgd optimizer.sgd.momentum=0.9 memory.host_budget=600MiB");
  EXPECT_EQ(over.code, 2);
  EXPECT_THAT(over.output,
              HasSubstr("\nraise memory.host_budget, or set offload.overlap = false, which copies gradients "
                        "after backward\n"));
}

}  // namespace
