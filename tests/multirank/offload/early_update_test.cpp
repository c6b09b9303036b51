// Updates of states on tiers that begin during backward: their results, their share, and the steps that cannot be
// completed.
#include <gmock/gmock.h>

#include <array>
#include <limits>

#include "support/offload_test.hpp"
#include "support/user_error.hpp"

namespace zr::test {
namespace {

using engine_tests::Run;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const std::string kStops = "train.nonfinite=stop ";

class EarlyUpdateTest : public OffloadTest {
 protected:
  static constexpr const char* kLate = " offload.overlap=false ";
  // A checkpoint each so many steps, without those of an earlier run.
  std::string saves(const std::string& name, int every) const {
    fs::remove_all(scratch_.path("c" + name));
    return " checkpoint.dir=c" + name + " checkpoint.keep=0 checkpoint.every=" + std::to_string(every);
  }
  std::map<std::string, std::string> saved(const std::string& name, int step) const {
    return contents(scratch_.path("c" + name + "/step-0000000" + std::to_string(step)));
  }
};

// Micro-batches have unequal weights. Every third, from the first on, leaves a part of the model unused.
RANK_BODY(trains_weighted, Run) {
  run.build();
  while (!run.engine->done()) {
    const int64_t micro = run.engine->micro_index();
    run.engine->backward(run.model->loss(run.engine->step_index(), micro), static_cast<double>(micro % 3 + 1));
    run.engine->step();
  }
}

class EarlyUpdateBits : public EarlyUpdateTest, public ::testing::WithParamInterface<int> {};

TEST_P(EarlyUpdateBits, AreThoseOfTheUpdateAfterBackward) {
  for (const std::string model : {"everything", "unused", "tied"})
    for (const std::string types : {"train.dtype=fp32", "train.dtype=bf16", "train.dtype=bf16 gradients.dtype=bf16",
                                    "train.dtype=fp16 fp16.loss_scale=256"}) {
      const std::string common = kStops + types + " parity.model=" + model + " train.steps=4 ";
      std::vector<std::string> names;
      const auto train = [&](const std::string& name, const std::string& how) {
        names.push_back(name);
        const Outcome done = shell(launch(GetParam(), trains_weighted,
                                          common + how + " job.name=" + name + " checkpoint.dir=c" + name +
                                              " checkpoint.every=4 train.gradient_accumulation=2"));
        ASSERT_EQ(done.code, 0) << common << how << done.output;
      };
      train("after", "strategy=zero1 offload.overlap=false" + states("nvme"));
      EXPECT_EQ(number("after", "/overlap/states"), 0);
      for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3"})
        for (const std::string tier : {"cpu", "nvme"}) {
          const std::string name = strategy + tier;
          train(name, "strategy=" + strategy + states(tier));
          const int64_t elements = number(name, "/overlap/states"), early = number(name, "/overlap/states_early");
          const bool uses_none = model == "unused" && GetParam() > 1 && strategy != "zero0";  // rank 0's part of it
          EXPECT_EQ(early > 0, !uses_none) << common << name;
          EXPECT_EQ(early == elements, model == "tied") << common << name << ": the other models leave parts unused";
          EXPECT_EQ(hash(name), hash("after")) << common << name;
          EXPECT_EQ(losses(name), losses("after")) << common << name;
          if (name == "zero1nvme") {
            EXPECT_EQ(number(name, "/tiers/nvme/written_bytes"), number("after", "/tiers/nvme/written_bytes"))
                << common;
          }
          EXPECT_TRUE(contents(scratch_.path("c" + name + "/step-00000004")) ==
                      contents(scratch_.path("cafter/step-00000004")))
              << common << name << " saves other states";
        }
      for (const std::string& name : names) fs::remove_all(scratch_.path("c" + name));
    }
}

INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, EarlyUpdateBits, ::testing::Values(1, 2, 3), ::testing::PrintToStringParamName());

// From the third step on, the last rank's loss is infinite.
RANK_BODY(stops_at_infinity, Run) {
  run.build();
  zr::Engine& engine = *run.engine;
  std::string stopped;
  while (stopped.empty() && !engine.done()) {
    const bool last = engine.step_index() >= 2 && engine.rank() == engine.world() - 1;
    const auto loss = run.model->loss(engine.step_index(), engine.micro_index());
    engine.backward(last ? loss * std::numeric_limits<float>::infinity() : loss);
    stopped = user_error_of([&] { engine.step(); });
  }
  EXPECT_THAT(stopped, StartsWith("step 3: the reduced gradient of '"));
  EXPECT_THAT(stopped,
              EndsWith("' is not finite; the loss of rank 1 is not finite either, and train.nonfinite = \"stop\" "
                       "(command line); check the data, lower optimizer.lr or set train.gradient_clipping, or set "
                       "train.nonfinite = \"skip\"; then resume from the last checkpoint"));
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { engine.save("later"); }, [&] { engine.get("scalar"); }, [&] { engine.weights_hash(); }})
    EXPECT_EQ(user_error_of(call),
              "training stopped in step 3, because a gradient was not finite (train.nonfinite = \"stop\"); resume from "
              "the last checkpoint");
}

TEST_F(EarlyUpdateTest, ANonFiniteGradientOnOneRankStopsAllAndTheCheckpointResumes) {
  for (const std::string tier : {"device", "cpu", "nvme"}) {
    const std::string how = kStops + "strategy=zero2 train.steps=4 checkpoint.dir=c checkpoint.every=2 job.name=s" +
                            (tier == "device" ? " " : states(tier));
    fs::remove_all(scratch_.path("c"));
    const Outcome stopped = shell(launch(2, stops_at_infinity, how));
    ASSERT_EQ(stopped.code, 0) << tier << stopped.output;
    const Outcome rest = shell(launch(2, engine_tests::trains, how + " checkpoint.resume=true"));
    ASSERT_EQ(rest.code, 0) << tier << rest.output;
    train(2, engine_tests::trains, "plain", "strategy=zero2 train.steps=4");
    EXPECT_EQ(hash("s"), hash("plain")) << tier;
  }
}

TEST_F(EarlyUpdateTest, HasTheSameBitsWithOtherWaysToRunAStep) {
  std::string jobs;
  const std::vector<std::string> ways{"gradients.reduce=last_micro_step",
                                      "gradients.overlap=false",
                                      "offload.device_fraction=0.4",
                                      "offload.activations=nvme offload.activation_bytes=1",
                                      "checkpoint.dir=c checkpoint.every=1 checkpoint.async=true",
                                      "strategy.zero2.bucket_bytes=64KiB",
                                      "train.dtype=bf16 job.threads=2 parity.model=large",
                                      "train.dtype=fp16 fp16.loss_scale=256 optimizer=sgd"};
  const auto name = [](std::size_t way, bool overlap) {
    return "way" + std::to_string(way) + (overlap ? "early" : "late");
  };
  for (std::size_t i = 0; i < ways.size(); ++i)
    for (const bool overlap : {false, true})
      jobs += "job.name=" + name(i, overlap) + " offload.overlap=" + (overlap ? "true " : "false ") + kStops + disk() +
              ways[i] + "\n";
  run(2, jobs, "strategy=zero2 train.steps=4 train.gradient_accumulation=2");
  for (std::size_t i = 0; i < ways.size(); ++i) {
    EXPECT_EQ(hash(name(i, true)), hash(name(i, false))) << ways[i];
    EXPECT_GT(number(name(i, true), "/overlap/states_early"), 0) << ways[i];
  }
}

// Between steps, the program changes the number of micro-batches and the parameters that are trained.
RANK_BODY(changes_between_steps, Run) {
  run.build();
  torch::Tensor bias = run.model->named_parameters()["twice.bias"];
  while (!run.engine->done()) {
    const int64_t step = run.engine->step_index();
    if (step == 2) run.engine->set_accumulation(1);
    if (step == 7) run.engine->set_accumulation(2);
    if (step == 4 || step == 6) {
      bias.set_requires_grad(step == 6);
      run.engine->refresh();
    }
    do {
      run.engine->backward(run.model->loss(step, run.engine->micro_index()));
    } while (!run.engine->step());
  }
}

TEST_F(EarlyUpdateTest, HasTheSameBitsAfterRefreshAndSetAccumulation) {
  const std::string common = "strategy=zero2 train.steps=9 train.gradient_accumulation=2 " + kStops;
  train(2, changes_between_steps, "after", common + saves("after", 9) + kLate + states("cpu"));
  EXPECT_EQ(number("after", "/overlap/updates_early"), 0);
  for (const std::string tier : {"cpu", "nvme"}) {
    train(2, changes_between_steps, tier, common + saves(tier, 9) + states(tier));
    EXPECT_EQ(hash(tier), hash("after")) << tier;
    EXPECT_EQ(losses(tier), losses("after")) << tier;
    EXPECT_TRUE(saved(tier, 9) == saved("after", 9)) << tier << " saves other states";
    EXPECT_GT(number(tier, "/overlap/updates_early"), 0) << tier;
  }
}

// The next step begins while a checkpoint is written in the background.
TEST_F(EarlyUpdateTest, AsynchronousCheckpointsHaveTheStatesOfTheirStep) {
  const std::string common = "strategy=zero2 train.steps=5 train.gradient_accumulation=1 " + kStops;
  train(2, engine_tests::trains, "after", common + saves("after", 1) + kLate + states("nvme"));
  for (const std::string tier : {"cpu", "nvme"}) {
    train(2, engine_tests::trains, tier, common + saves(tier, 1) + " checkpoint.async=true" + states(tier));
    EXPECT_EQ(number(tier, "/overlap/updates_early"), 4) << tier;
    for (int step = 1; step <= 5; ++step) {
      EXPECT_FALSE(saved(tier, step).empty()) << tier << step;
      EXPECT_TRUE(saved(tier, step) == saved("after", step)) << tier << " saves other states, " << step;
    }
  }
}

// With one micro-batch per step, the gradient buffer is also that of the reduced gradients.
TEST_F(EarlyUpdateTest, HasTheSameBitsWhereZero0ReducesGradientsInPlace) {
  const std::string common =
      "strategy=zero0 gradients.reduce=last_micro_step train.gradient_accumulation=1 train.steps=4 ";
  for (const int ranks : {1, 2}) {
    train(ranks, engine_tests::trains, "after", common + kStops + "offload.overlap=false" + states("nvme"));
    for (const std::string tier : {"cpu", "nvme"}) {
      train(ranks, engine_tests::trains, tier, common + kStops + states(tier));
      EXPECT_EQ(hash(tier), hash("after")) << ranks << tier;
      EXPECT_EQ(losses(tier), losses("after")) << ranks << tier;
      EXPECT_EQ(number(tier, "/overlap/updates_early"), 3) << ranks << tier;
    }
  }
}

// Skipping, clipping, the norm, and gradients on a disk or narrower than weights need all gradients first.
TEST_F(EarlyUpdateTest, WaitsForBackwardWhereTheResultCouldDiffer) {
  std::string jobs;
  for (const auto& [name, keys] :
       std::vector<std::array<std::string, 2>>{{"skip", "train.nonfinite=skip"},
                                               {"clip", kStops + "train.gradient_clipping=1"},
                                               {"lamb", kStops + "optimizer=lamb"},
                                               {"off", kStops + "offload.overlap=false"},
                                               {"disk", kStops + "offload.gradients=nvme"},
                                               {"narrow", kStops + "gradients.dtype=bf16"},
                                               {"device", kStops + "offload.optimizer=device"}})
    jobs += "job.name=" + name + disk() + keys + "\n";
  run(2, jobs, "strategy=zero2 train.steps=2");
  for (const std::string name : {"skip", "clip", "lamb", "off", "disk", "narrow", "device"})
    EXPECT_EQ(number(name, "/overlap/states"), 0) << name;
}

// A rank transfers about 24 tiles per step: the faults are in steps 2, 3 and 4, the first ones with early updates.
TEST_F(EarlyUpdateTest, SLOW_FaultsOfTheTierEndTheJobAndKeepTheCheckpoint) {
  train(2, engine_tests::trains, "plain", "strategy=zero2 train.steps=4");
  run(2, "job.name=without_faults " + kStops + disk() + "offload.optimizer=nvme", "strategy=zero2 train.steps=4");
  EXPECT_GT(number("without_faults", "/overlap/states_early"), 0);
  const std::string how = kStops + "strategy=zero2 train.steps=4 checkpoint.dir=c checkpoint.every=2 job.name=f" +
                          disk() + "offload.optimizer=" + kFailing;
  for (const std::string fault : {"read=EIO@", "write=EIO@", "write=ENOSPC@", "flip@"})
    for (const std::string count : {"30", "55", "80"}) {
      fs::remove_all(scratch_.path("c"));
      const Outcome failed = shell("ZR_TIER_FAULT=" + fault + count + " " + launch(2, engine_tests::trains, how));
      EXPECT_EQ(failed.code, 3) << fault << count << failed.output;
      EXPECT_THAT(failed.output, HasSubstr("states of '")) << fault << count;
      const Outcome rest = shell(launch(2, engine_tests::trains, how + " checkpoint.resume=true"));
      ASSERT_EQ(rest.code, 0) << fault << count << rest.output;
      EXPECT_EQ(hash("f"), hash("plain")) << fault << count;
    }
}

}  // namespace
}  // namespace zr::test
