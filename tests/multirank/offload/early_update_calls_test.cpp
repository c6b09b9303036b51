// Calls of a program around an update that runs in place during backward: calls that are rejected, writes to weights,
// and backwards that fail and are repeated.
#include <gmock/gmock.h>

#include "support/offload_test.hpp"
#include "support/user_error.hpp"
#include "zr/parameters.hpp"

namespace zr::test {
namespace {

using engine_tests::Run;

const std::string kInPlace = "train.nonfinite=stop train.gradient_accumulation=1 ";

class EarlyUpdateCallsTest : public OffloadTest {
 protected:
  // Two ranks with states on a tier get the result of `body` that a training without interruptions has.
  void expect_plain_result(const RankBody& body, const std::string& how) {
    train(2, engine_tests::trains, "plain", kInPlace + how);
    for (const std::string tier : {"cpu", "nvme"}) {
      train(2, body, tier, kInPlace + how + states(tier));
      EXPECT_EQ(hash(tier), hash("plain")) << tier;
    }
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

TEST_F(EarlyUpdateCallsTest, OverwritesGradients) {
  const Outcome done = shell(launch(2, reads_gradients_of_early_updates, kInPlace + "strategy=zero1" + states("nvme")));
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
  EXPECT_EQ(
      error_of([&] { run.engine->step(); }),
      run.engine->rank() > 0
          ? "engine.step(): the update of step 2 failed on rank 0; see that rank's error, then resume from the "
            "last checkpoint"
          : "engine.step(): the program wrote, or may have written, to weights ('twice.bias') after the step's last "
            "engine.backward() had begun, but a part of the update ran during it; training cannot continue: "
            "resume from the last checkpoint; write before the forward of that micro-batch or after engine.step(), "
            "or set offload.overlap = false");
  for (const auto& call : std::vector<std::function<void()>>{[&] { step(run); }, [&] { run.engine->save("later"); },
                                                             [&] { run.engine->load("c"); }})
    EXPECT_EQ(error_of(call),
              "training stopped in step 2, because its update failed on rank 0; resume from the last checkpoint");
}

TEST_F(EarlyUpdateCallsTest, StopsOnAllRanksIfOneWritesToWeightsBetweenBackwardAndStep) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    const Outcome done = shell(
        launch(2, writes_before_the_update,
               kInPlace + "strategy=zero1 communicator.share_weights=false train.dtype=" + dtype + states("cpu")));
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

TEST_F(EarlyUpdateCallsTest, RejectsCallsThatNeedStatesAndWeightsDuringTheUpdateAndContinues) {
  expect_plain_result(calls_during_the_update, "strategy=zero2 train.steps=4");
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

TEST_F(EarlyUpdateCallsTest, UndoesABackwardWhoseLearningRateTheProgramCannotGive) {
  const std::string how = kInPlace + "strategy=zero1 train.steps=4";
  train(2, schedule_returns, "plain", how);
  train(2, schedule_throws, "throws", how + states("nvme"));
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

TEST_F(EarlyUpdateCallsTest, RepeatsABackwardThatFailed) {
  expect_plain_result(repeats_a_backward, "strategy=zero2 train.steps=4 parity.model=large");
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

TEST_F(EarlyUpdateCallsTest, RepeatsABackwardThatFailedOnOneRank) {
  expect_plain_result(repeats_a_backward_on_one_rank, "strategy=zero2 train.steps=5");
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

TEST_F(EarlyUpdateCallsTest, RejectsAStepWithoutWeightAndContinues) {
  expect_plain_result(repeats_a_backward_without_weight, "strategy=zero2 train.steps=4");
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

TEST_F(EarlyUpdateCallsTest, ARejectedReadDoesNotHideAWriteToWeights) {
  for (const std::string tier : {"cpu", "nvme"}) {
    const Outcome done = shell(
        launch(1, writes_and_reads_before_the_update, kInPlace + "strategy=zero1 train.dtype=bf16" + states(tier)));
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

TEST_F(EarlyUpdateCallsTest, DetectsAWriteThroughAPointer) {
  const Outcome done = shell(launch(1, writes_through_a_pointer, kInPlace + "strategy=zero1" + states("cpu")));
  EXPECT_EQ(done.code, 0) << done.output;
}

// Sets the number of micro-batches that it has already before every step.
RANK_BODY(sets_the_same_accumulation, Run) {
  run.build();
  while (!run.engine->done()) {
    run.engine->set_accumulation(run.engine->accumulation());
    step(run);
  }
}

TEST_F(EarlyUpdateCallsTest, SettingTheSameAccumulationChangesNothing) {
  const Outcome done = shell(
      launch(1, sets_the_same_accumulation, kInPlace + "strategy=zero1 train.steps=3 job.name=same" + states("cpu")));
  ASSERT_EQ(done.code, 0) << done.output;
  EXPECT_EQ(number("same", "/overlap/updates_early"), 2);
}

// Backward of the third step fails at one of its last gradients, when most buckets have been reduced. The engine
// rejects more training, the weights are those before, and the engine can be destroyed.
void fail_in_the_middle_of_backward(Run& run, bool in_place) {
  run.build();
  step(run);
  step(run);
  const auto parameters = run.model->named_parameters();
  std::vector<torch::Tensor> before;
  for (const auto& parameter : parameters) before.push_back(parameter.value().detach().clone());
  torch::Tensor last = parameters["embedding.weight"];
  last.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("on purpose"); });
  EXPECT_ANY_THROW(run.engine->backward(run.model->loss(2, run.engine->micro_index())));
  const std::string text =
      "the last engine.backward() ended with an exception, so its gradients are incomplete; end the job, or create a "
      "new engine";
  EXPECT_EQ(user_error_of([&] { run.engine->step(); }), text);
  EXPECT_EQ(user_error_of([&] { run.engine->backward(run.model->loss(2, 0)); }), text);
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(torch::equal(parameters[i].value(), before[i])) << parameters[i].key();
    if (!in_place && before[i].requires_grad()) {
      EXPECT_TRUE(torch::equal(run.engine->get(parameters[i].key()), before[i])) << parameters[i].key();
    }
  }
  EXPECT_EQ(!user_error_of([&] { run.engine->get("scalar"); }).empty(), in_place);
  run.engine.reset();
}

RANK_BODY(fails_in_the_middle_of_backward, Run) { fail_in_the_middle_of_backward(run, true); }

TEST_F(EarlyUpdateCallsTest, ABackwardThatFailsHalfwayKeepsTheWeights) {
  for (const std::string tier : {"cpu", "nvme"}) {
    const Outcome done =
        shell(launch(2, fails_in_the_middle_of_backward,
                     "strategy=zero2 train.gradient_accumulation=1 train.steps=4 train.nonfinite=stop" + states(tier)));
    EXPECT_EQ(done.code, 0) << tier << done.output;
  }
}

// The engine is destroyed between the last backward of a step and step(), while its worker may update states.
RANK_BODY(destroys_the_engine_during_the_update, Run) {
  run.build();
  step(run);
  step(run);
  run.engine->backward(run.model->loss(2, run.engine->micro_index()));
  run.engine.reset();
}

TEST_F(EarlyUpdateCallsTest, AnEngineCanBeDestroyedDuringTheUpdate) {
  for (const std::string tier : {"cpu", "nvme"}) {
    const Outcome done =
        shell(launch(2, destroys_the_engine_during_the_update,
                     "strategy=zero2 train.gradient_accumulation=1 parity.model=wide job.name=ended train.steps=4" +
                         states(tier) + "train.nonfinite=stop"));
    EXPECT_EQ(done.code, 0) << tier << done.output;
    EXPECT_EQ(number("ended", "/overlap/updates_early"), 1) << tier << ": that of the second step";
  }
}

}  // namespace
}  // namespace zr::test
