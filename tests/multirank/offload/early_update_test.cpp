// Updates of states on tiers that begin during backward: their results, their share, and the steps that cannot be
// completed.
#include <gmock/gmock.h>

#include <array>
#include <limits>

#include "support/offload_test.hpp"
#include "support/user_error.hpp"
#include "zr/parameters.hpp"

namespace zr::test {
namespace {

using engine_tests::Run;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const std::string kStops = "train.nonfinite=stop ";

class EarlyUpdateTest : public OffloadTest {
 protected:
  // A run of two ranks with states on the device.
  void train_plain(const std::string& how) {
    const Outcome done = shell(launch(2, engine_tests::trains, "job.name=plain " + how));
    ASSERT_EQ(done.code, 0) << done.output;
  }
  std::string states(const std::string& tier) const {
    return tier == "cpu" ? " offload.optimizer=cpu " : disk() + "offload.optimizer=" + tier + " ";
  }
};

// The message of the zr::Error that a call throws; "" if it throws none.
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

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
          EXPECT_TRUE(contents(scratch_.path("c" + name + "/step-00000004")) ==
                      contents(scratch_.path("cafter/step-00000004")))
              << common << name << " saves other states";
        }
      for (const std::string& name : names) fs::remove_all(scratch_.path("c" + name));
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, EarlyUpdateBits, ::testing::Values(1, 2, 3), ::testing::PrintToStringParamName());

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
    train_plain("strategy=zero2 train.steps=4");
    EXPECT_EQ(hash("s"), hash("plain")) << tier;
  }
}

// One step, whose last backward has `weight`.
void step(Run& run, double weight = 1) {
  zr::Engine& engine = *run.engine;
  do {
    engine.backward(run.model->loss(engine.step_index(), engine.micro_index()), weight);
  } while (!engine.step());
}

RANK_BODY(reads_gradients_of_early_updates, Run) {
  run.build();
  const auto gradient = [&] { return run.engine->get("scalar", zr::TensorKind::gradient); };
  step(run);
  EXPECT_EQ(user_error_of(gradient),
            "engine.get('scalar', zr::TensorKind::gradient): the update, part of which ran during backward, has "
            "overwritten the gradients; set offload.overlap = false to keep them after engine.step()");
}

TEST_F(EarlyUpdateTest, OverwritesGradients) {
  const Outcome done = shell(launch(2, reads_gradients_of_early_updates,
                                    kStops + "strategy=zero1 train.gradient_accumulation=1" + states("nvme")));
  EXPECT_EQ(done.code, 0) << done.output;
}

// Writes to a weight after the last backward of a step.
RANK_BODY(writes_before_the_update, Run) {
  run.build();
  step(run);
  run.engine->backward(run.model->loss(1, run.engine->micro_index()));
  if (run.engine->rank() == 0) {
    const torch::NoGradGuard no_grad;
    run.model->named_parameters()["twice.bias"].add_(1);
  }
  EXPECT_EQ(error_of([&] { run.engine->step(); }),
            run.engine->rank() > 0
                ? "engine.step(): the update of step 2 failed on rank 0; see that rank's error, then resume from the "
                  "last checkpoint"
                : "engine.step(): the program wrote, or may have written, to weights after the step's last "
                  "engine.backward() had begun, but a part of the update ran during it; training cannot continue: "
                  "resume from the last checkpoint; write before that call or after engine.step(), or set "
                  "offload.overlap = false");
  for (const auto& call : std::vector<std::function<void()>>{[&] { step(run); }, [&] { run.engine->save("later"); },
                                                             [&] { run.engine->load("c"); }})
    EXPECT_EQ(error_of(call),
              "training stopped in step 2, because its update failed on rank 0; resume from the last checkpoint");
}

TEST_F(EarlyUpdateTest, StopsOnAllRanksIfOneWritesToWeightsBetweenBackwardAndStep) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    const Outcome done = shell(launch(
        2, writes_before_the_update,
        kStops + "strategy=zero1 communicator.share_weights=false train.gradient_accumulation=1 train.dtype=" + dtype +
            states("cpu")));
    EXPECT_EQ(done.code, 0) << done.output;
  }
}

// Calls that read or replace what the update changes, between the last backward of a step and step().
RANK_BODY(calls_during_the_update, Run) {
  run.build();
  zr::Engine& engine = *run.engine;
  step(run);
  const std::string folder = engine.save("c");
  engine.backward(run.model->loss(1, engine.micro_index()));
  const auto parameters = run.model->named_parameters();
  const torch::Tensor value = torch::zeros(parameters["scalar"].sizes());
  const auto said = [](const std::string& call) {
    return call +
           " was called after the last engine.backward() of a step had begun and before its engine.step(), while "
           "optimizer states on tiers are updated; call it after engine.step(), or set offload.overlap = false";
  };
  EXPECT_EQ(user_error_of([&] { engine.get("scalar"); }), said("engine.get('scalar')"));
  EXPECT_EQ(user_error_of([&] { engine.get("scalar", zr::TensorKind::state, "exp_avg"); }),
            said("engine.get('scalar')"));
  EXPECT_EQ(user_error_of([&] { engine.set("scalar", zr::TensorKind::value, value); }), said("engine.set('scalar')"));
  EXPECT_EQ(user_error_of([&] { engine.set("scalar", zr::TensorKind::state, value, "exp_avg"); }),
            said("engine.set('scalar')"));
  EXPECT_EQ(user_error_of([&] { engine.weights_hash(); }), said("engine.weights_hash()"));
  EXPECT_EQ(user_error_of([&] { engine.finish(); }), said("engine.finish()"));
  EXPECT_EQ(user_error_of([&] { engine.set_lr(1); }), said("engine.set_lr(1)"));
  EXPECT_EQ(user_error_of([&] { engine.set_schedule([](int64_t) { return 1.0; }); }),
            said("engine.set_schedule(function)"));
  EXPECT_EQ(user_error_of([&] { zr::gather(parameters["scalar"]); }), said("zr::gather(\"scalar\")"));
  EXPECT_NE(user_error_of([&] { engine.save("c"); }), "");
  EXPECT_NE(user_error_of([&] { engine.load(folder); }), "");
  EXPECT_NE(user_error_of([&] { engine.set_accumulation(1); }), "");
  EXPECT_NE(user_error_of([&] { engine.release(); }), "");
  EXPECT_NE(user_error_of([&] { engine.refresh(); }), "");
  { const zr::Engine::Evaluation evaluation(engine); }
  engine.step();
  EXPECT_EQ(user_error_of([&] { engine.get("scalar"); }), "");
  while (!engine.done()) step(run);
}

TEST_F(EarlyUpdateTest, RejectsCallsThatNeedStatesAndWeightsDuringTheUpdateAndContinues) {
  const std::string how = kStops + "strategy=zero2 train.steps=4 train.gradient_accumulation=1 ";
  train_plain(how);
  for (const std::string tier : {"cpu", "nvme"}) {
    const Outcome done = shell(launch(2, calls_during_the_update, how + states(tier) + "job.name=" + tier));
    ASSERT_EQ(done.code, 0) << done.output;
    EXPECT_EQ(hash(tier), hash("plain")) << tier;
  }
}

// The function that sets the learning rate throws in the third step: the last backward is undone on all ranks.
RANK_BODY(schedule_throws, Run) {
  run.build();
  zr::Engine& engine = *run.engine;
  bool fails = true;
  engine.set_schedule([&](int64_t index) {
    if (index == 2 && fails && engine.rank() == 1) throw std::runtime_error("no rate");
    return index == 2 && fails ? 1.0 : 0.01;
  });
  step(run);
  step(run);
  const auto backward = [&] { engine.backward(run.model->loss(2, engine.micro_index())); };
  if (engine.rank() == 1) {
    EXPECT_THROW(backward(), std::runtime_error);
  } else {
    EXPECT_EQ(error_of(backward),
              "engine.backward(): the function passed to engine.set_schedule() failed on rank 1 for update 2; nothing "
              "was changed; see that rank's error");
  }
  fails = false;
  while (!engine.done()) step(run);
}

RANK_BODY(schedule_returns, Run) {
  run.build();
  run.engine->set_schedule([](int64_t) { return 0.01; });
  while (!run.engine->done()) step(run);
}

TEST_F(EarlyUpdateTest, UndoesABackwardWhoseLearningRateTheProgramCannotGive) {
  const std::string how = kStops + "strategy=zero1 train.steps=4 train.gradient_accumulation=1 ";
  const Outcome plain = shell(launch(2, schedule_returns, how + "job.name=plain"));
  ASSERT_EQ(plain.code, 0) << plain.output;
  const Outcome done = shell(launch(2, schedule_throws, how + states("nvme") + "job.name=throws"));
  ASSERT_EQ(done.code, 0) << done.output;
  EXPECT_EQ(hash("throws"), hash("plain"));
}

// The third backward fails before its first gradient, and is repeated.
RANK_BODY(repeats_a_backward, Run) {
  run.build();
  for (int steps = 0; steps < 4; ++steps) {
    if (steps == 2) {
      torch::Tensor loss = run.model->loss(2, run.engine->micro_index());
      loss.register_hook([](const torch::Tensor&) { throw std::runtime_error("on purpose"); });
      EXPECT_ANY_THROW(run.engine->backward(loss));
      EXPECT_NE(user_error_of([&] { run.engine->set_accumulation(2); }), "") << "the failed call must be repeated";
      EXPECT_EQ(user_error_of([&] { run.engine->backward(run.model->loss(2, run.engine->micro_index()), 2); }),
                "engine.backward(loss, weight): the weight is 2, but the failed call that this one repeats had 1; pass "
                "the same weight, or set offload.overlap = false");
    }
    step(run);
  }
  run.engine->finish();
}

// Backward fails on rank 0 only, which repeats it, while rank 1 is in its own.
RANK_BODY(repeats_a_backward_on_one_rank, Run) {
  run.build();
  while (!run.engine->done()) {
    if (run.engine->rank() == 0 && run.engine->step_index() % 2 == 1) {
      torch::Tensor loss = run.model->loss(run.engine->step_index(), run.engine->micro_index());
      loss.register_hook([](const torch::Tensor&) { throw std::runtime_error("on purpose"); });
      EXPECT_ANY_THROW(run.engine->backward(loss));
    }
    step(run);
  }
}

TEST_F(EarlyUpdateTest, RepeatsABackwardThatFailedOnOneRank) {
  const std::string how = kStops + "strategy=zero2 train.steps=5 train.gradient_accumulation=1 ";
  train_plain(how);
  for (const std::string tier : {"cpu", "nvme"}) {
    const Outcome done = shell(launch(2, repeats_a_backward_on_one_rank, how + states(tier) + "job.name=" + tier));
    ASSERT_EQ(done.code, 0) << done.output;
    EXPECT_EQ(hash(tier), hash("plain")) << tier;
  }
}

// All ranks pass weight 0, and rank 0 repeats its backward: step() rejects the step, and the next one is right.
RANK_BODY(repeats_a_backward_without_weight, Run) {
  run.build();
  step(run);
  const auto loss = [&] { return run.model->loss(run.engine->step_index(), run.engine->micro_index()); };
  if (run.engine->rank() == 0) {
    torch::Tensor failing = loss();
    failing.register_hook([](const torch::Tensor&) { throw std::runtime_error("on purpose"); });
    EXPECT_ANY_THROW(run.engine->backward(failing, 0));
  }
  run.engine->backward(loss(), 0);
  EXPECT_NE(user_error_of([&] { run.engine->step(); }), "");
  while (!run.engine->done()) step(run);
}

TEST_F(EarlyUpdateTest, RejectsAStepWithoutWeightAndContinues) {
  const std::string how = kStops + "strategy=zero2 train.steps=4 train.gradient_accumulation=1 ";
  train_plain(how);
  const Outcome done = shell(launch(2, repeats_a_backward_without_weight, how + states("nvme") + "job.name=zero"));
  ASSERT_EQ(done.code, 0) << done.output;
  EXPECT_EQ(hash("zero"), hash("plain"));
}

// A write that engine.get() must not hide from step().
RANK_BODY(writes_and_reads_before_the_update, Run) {
  run.build();
  step(run);
  run.engine->backward(run.model->loss(1, run.engine->micro_index()));
  {
    const torch::NoGradGuard no_grad;
    run.model->named_parameters()["twice.bias"].add_(1);
  }
  EXPECT_NE(user_error_of([&] { run.engine->get("twice.bias"); }), "");
  EXPECT_NE(user_error_of([&] { run.engine->step(); }), "");
}

TEST_F(EarlyUpdateTest, ARejectedReadDoesNotHideAWriteToWeights) {
  for (const std::string tier : {"cpu", "nvme"}) {
    const Outcome done =
        shell(launch(1, writes_and_reads_before_the_update,
                     kStops + "strategy=zero1 train.gradient_accumulation=1 train.dtype=bf16" + states(tier)));
    EXPECT_EQ(done.code, 0) << done.output;
  }
}

// Writes through a raw pointer to the last element of a weight, which libtorch does not count.
RANK_BODY(writes_through_a_pointer, Run) {
  run.build();
  step(run);
  run.engine->backward(run.model->loss(1, run.engine->micro_index()));
  const torch::Tensor weight = run.model->named_parameters()["twice.bias"];
  *(weight.data_ptr<float>() + weight.numel() - 1) += 1;
  EXPECT_NE(user_error_of([&] { run.engine->step(); }), "");
}

TEST_F(EarlyUpdateTest, DetectsAWriteThroughAPointer) {
  const Outcome done = shell(
      launch(1, writes_through_a_pointer, kStops + "strategy=zero1 train.gradient_accumulation=1" + states("cpu")));
  EXPECT_EQ(done.code, 0) << done.output;
}

TEST_F(EarlyUpdateTest, HasTheSameBitsWithOtherWaysToRunAStep) {
  std::string jobs;
  const std::vector<std::string> ways{"gradients.reduce=last_micro_step",
                                      "gradients.overlap=false",
                                      "offload.device_fraction=0.4",
                                      "offload.activations=nvme offload.activation_bytes=1",
                                      "checkpoint.dir=c checkpoint.every=1 checkpoint.async=true",
                                      "strategy.zero2.bucket_bytes=64KiB",
                                      "train.dtype=bf16 job.threads=2 parity.model=large"};
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

TEST_F(EarlyUpdateTest, RepeatsABackwardThatFailed) {
  const std::string how = kStops + "strategy=zero2 train.steps=4 train.gradient_accumulation=1 parity.model=large ";
  train_plain(how);
  const Outcome done = shell(launch(2, repeats_a_backward, how + states("nvme") + "job.name=repeated"));
  ASSERT_EQ(done.code, 0) << done.output;
  EXPECT_EQ(hash("repeated"), hash("plain"));
}

// Sets the number of micro-batches that it has already before every step.
RANK_BODY(sets_the_same_accumulation, Run) {
  run.build();
  while (!run.engine->done()) {
    run.engine->set_accumulation(run.engine->accumulation());
    step(run);
  }
}

TEST_F(EarlyUpdateTest, SettingTheSameAccumulationChangesNothing) {
  const Outcome done = shell(
      launch(1, sets_the_same_accumulation, kStops + "strategy=zero1 train.steps=3 job.name=same" + states("cpu")));
  ASSERT_EQ(done.code, 0) << done.output;
  EXPECT_EQ(number("same", "/overlap/updates_early"), 2);
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
TEST_F(EarlyUpdateTest, FaultsOfTheTierEndTheJobAndKeepTheCheckpoint) {
  train_plain("strategy=zero2 train.steps=4");
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
