// Steps with gradients that are not finite: all ranks skip them.
#include <limits>

#include "support/engine_test.hpp"

namespace {

using namespace engine_tests;

// A skipped step changes nothing that later steps depend on: no optimizer state, no step count, no schedule.
MULTIRANK_TEST(
    EngineTest, SkippedStepChangesNoState, {2},
    zr::test::combine({{"strategy=zero1 train.steps=9 schedule.use=linear schedule.linear.warmup=4 optimizer.lr=0.1"},
                       {"train.dtype=fp32", "train.dtype=bf16", "train.dtype=fp16 fp16.initial_scale_power=8"}})) {
  std::vector<std::string> hashes;
  for (const bool skips : {true, false}) {
    run.build();
    run.micro_step();
    if (skips) {
      run.engine->backward(run.model->loss(9, run.engine->micro_index()) * std::numeric_limits<float>::quiet_NaN());
      run.engine->step();
    }
    run.engine->backward(run.model->loss(1, run.engine->micro_index()));
    run.engine->step();
    hashes.push_back(run.engine->weights_hash());
    run.engine.reset();
  }
  EXPECT_EQ(hashes[0], hashes[1]) << "a run with a skipped step ends with the same weights as a run without it";
}

TEST_F(EngineTest, ReportsLossScalePerStep) {
  ASSERT_EQ(run(2, trains,
                "train.dtype=fp16 train.steps=4 parity.overflows=true fp16.initial_scale_power=8 fp16.hysteresis=1")
                .code,
            0);
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 4u);
  const std::vector<double> scales{256, 128, 128, 64};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["loss_scale"], scales[i]) << i;
    EXPECT_EQ(rows[i].contains("skipped"), i % 2 == 0) << i;
  }
  EXPECT_EQ(summary()["skipped"], 2);
  EXPECT_EQ(summary()["loss_scale"], 64);
  ASSERT_EQ(run(2, trains, "train.steps=1").code, 0);
  EXPECT_FALSE(metrics()[0].contains("loss_scale")) << "fp32 has no loss scale";
}

// From the third step on, the last rank's loss is NaN.
RANK_BODY(never_finite, Run) {
  run.build();
  while (!run.engine->done()) {
    const bool nan_loss = run.engine->step_index() >= 2 && run.engine->rank() == run.engine->world() - 1;
    const auto loss = run.model->loss(run.engine->step_index(), run.engine->micro_index());
    run.engine->backward(nan_loss ? loss * std::numeric_limits<float>::quiet_NaN() : loss);
    run.engine->step();
  }
}

TEST_F(EngineTest, StopsAfterTooManySkippedStepsAndNamesParameterAndRank) {
  for (const std::string& layout : zr::test::kLayouts)
    for (const std::string dtype : {"bf16", "fp16"}) {
      const Result result = run(
          3, never_finite,
          "train.steps=50 train.max_skipped_steps=3 fp16.initial_scale_power=8 train.dtype=" + dtype + " " + layout);
      EXPECT_EQ(result.code, 2) << result.output;
      const std::string says =
          "gradients were not finite in 3 steps in a row, as many as train.max_skipped_steps (command line) allows: "
          "'scalar' "
          "was the first parameter that overflowed, on rank 2; the loss of rank 2 was not finite either; the weights "
          "are those after step 2" +
          std::string(dtype == "fp16" ? ", and the loss scale is 64" : "") +
          "; check the data of that rank, lower optimizer.lr or set train.gradient_clipping" +
          (dtype == "fp16" ? ", or set train.dtype = \"bf16\", which has the range of fp32" : "");
      EXPECT_NE(result.output.find(says), std::string::npos) << dtype << "\n" << result.output;
      EXPECT_EQ(metrics().size(), 5u) << "metrics must have a row for every step, skipped or not";
    }
}

TEST_F(EngineTest, NamesRankWhenOneSkippedStepIsAllowed) {
  const Result result = run(2, never_finite, "train.steps=50 train.max_skipped_steps=1");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_NE(result.output.find("'scalar' was the first parameter that overflowed, on rank 1;"), std::string::npos)
      << result.output;
}

// Every rank's gradients are finite, but their sum over ranks is not.
RANK_BODY(sum_not_finite, Run) {
  run.build();
  while (!run.engine->done()) {
    run.engine->backward((run.model->named_parameters()["scalar"].to(torch::kFloat) * 3e38).sum());
    run.engine->step();
  }
}

TEST_F(EngineTest, DistinguishesOverflowedSumFromOverflowedGradients) {
  const Result result = run(2, sum_not_finite, "train.steps=50 train.max_skipped_steps=2");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_NE(result.output.find("allows: 'scalar' was the first parameter whose sum over ranks and micro-batches "
                               "overflowed, although no rank's own gradient did; the weights"),
            std::string::npos)
      << result.output;
}

RANK_BODY(skips_non_finite, Run) {
  run.build();
  run.micro_step();
  const auto hash = run.engine->weights_hash();
  const auto moment = run.engine->get("twice.weight", zr::TensorKind::state, "exp_avg");
  // Only the last rank's loss is not finite.
  const bool mine = run.engine->rank() == run.engine->world() - 1;
  auto loss = run.model->loss(1, run.engine->micro_index());
  run.engine->backward(mine ? loss * std::numeric_limits<float>::infinity() : loss);
  run.engine->step();
  EXPECT_EQ(run.engine->weights_hash(), hash)
      << "a non-finite gradient on one rank leaves the weights of all ranks unchanged";
  EXPECT_TRUE(same(run.engine->get("twice.weight", zr::TensorKind::state, "exp_avg"), moment))
      << "a non-finite gradient leaves the optimizer state unchanged";
  run.micro_step();
  EXPECT_NE(run.engine->weights_hash(), hash) << "the next step updates the weights again";
}

TEST_F(EngineTest, SkippedStepDoesNotAdvanceSchedule) {
  ASSERT_EQ(run(1, trains, "train.steps=6 schedule.use=linear schedule.linear.warmup=3 optimizer.lr=1.0").code, 0);
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 6u);
  const std::vector<double> climb{0.25, 0.5, 0.75, 1};
  for (std::size_t i = 0; i < climb.size(); ++i) EXPECT_EQ(rows[i]["lr"], climb[i]) << i;
  for (std::size_t i = 4; i < rows.size(); ++i) EXPECT_LT(rows[i]["lr"], rows[i - 1]["lr"]) << i;
  ASSERT_EQ(
      run(1, skips_non_finite, "train.steps=6 schedule.use=linear schedule.linear.warmup=3 optimizer.lr=1.0").code, 0);
  const auto skipped = metrics();
  EXPECT_EQ(skipped[0]["lr"], 0.25);
  EXPECT_EQ(skipped[1]["lr"], 0.5);
  EXPECT_EQ(skipped[2]["lr"], 0.5) << "the skipped step must not advance the schedule";
}

TEST_F(EngineTest, AllRanksSkipStepWithNonFiniteGradients) {
  for (const std::string& layout : zr::test::kLayouts)
    for (const char* dtype : {"fp32", "fp16 fp16.initial_scale_power=8"}) {
      const Result result = run(2, skips_non_finite, "train.steps=5 " + layout + " train.dtype=" + dtype);
      EXPECT_EQ(result.code, 0) << dtype << "\n" << result.output;
      const auto rows = metrics();
      ASSERT_EQ(rows.size(), 3u);
      EXPECT_TRUE(rows[1].contains("skipped"));
      EXPECT_FALSE(rows[2].contains("skipped"));
    }
}

TEST_F(EngineTest, WritesNullForNonFiniteValues) {
  const Result result = run(2, never_finite, "train.steps=3");
  ASSERT_EQ(result.code, 0) << result.output;
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 3u);
  for (const Json& row : rows)
    for (const auto& [name, value] : row.items())
      EXPECT_TRUE(value.is_number() || value.is_null() || (name == "skipped" && value == true)) << row;
  for (const char* name : {"loss", "grad_norm"}) {
    EXPECT_TRUE(rows[1][name].is_number()) << rows[1];
    EXPECT_TRUE(rows[2][name].is_null()) << rows[2];
  }
  EXPECT_EQ(rows[2]["skipped"], true);
  EXPECT_TRUE(summary().contains("loss") && summary()["loss"].is_null()) << summary();
}

}  // namespace
