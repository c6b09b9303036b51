// What training has come to, counted without a model.
#include "engine/training_progress.hpp"

#include <gtest/gtest.h>

#include "base/error.hpp"

namespace zr::host {
namespace {

engine::TrainingProgress two_micro_steps() { return {engine::LossScaleKeys{}, 2, 3, 5}; }

void make_step(engine::TrainingProgress& progress, const std::vector<char>& touched) {
  for (int micro = 0; micro < progress.accumulation(); ++micro) {
    progress.begin_micro(0.5, 1);
    progress.end_micro();
  }
  progress.begin_update(touched);
  progress.updated();
  progress.complete_step(0.25, 2, true);
  progress.end_step(8);
}

TEST(TrainingProgressTest, StartsAtStepZero) {
  const engine::TrainingProgress progress = two_micro_steps();
  EXPECT_EQ(progress.step(), 0);
  EXPECT_EQ(progress.updates(), 0);
  EXPECT_EQ(progress.param_steps(), (std::vector<int64_t>{0, 0, 0}));
  EXPECT_TRUE(progress.last_step_applied());
  EXPECT_FALSE(progress.within_step());
  EXPECT_FALSE(progress.done());
}

TEST(TrainingProgressTest, ReachesTheBoundaryAfterAllMicroSteps) {
  engine::TrainingProgress progress = two_micro_steps();
  progress.begin_micro(1.5, 2);
  EXPECT_TRUE(progress.in_backward());
  EXPECT_TRUE(progress.within_step());
  progress.end_micro();
  EXPECT_FALSE(progress.in_backward());
  EXPECT_TRUE(progress.within_step());
  EXPECT_FALSE(progress.at_boundary());
  progress.begin_micro(2.5, 0);
  progress.end_micro();
  EXPECT_TRUE(progress.at_boundary());
  ASSERT_EQ(progress.losses().size(), 2u);
  EXPECT_EQ(progress.losses()[0].value(), 1.5);
  EXPECT_EQ(progress.losses()[1].value(), 2.5);
  EXPECT_EQ(progress.weights(), (std::vector<double>{2, 0}));
}

TEST(TrainingProgressTest, CountsTheUpdatesOfEachParameterWithLocalGradients) {
  engine::TrainingProgress progress = two_micro_steps();
  progress.begin_update({1, 1, 0});
  progress.set_gradients_local(true);
  progress.begin_update({1, 0, 1});
  EXPECT_EQ(progress.param_steps(), (std::vector<int64_t>{2, 1, 1}));
  EXPECT_EQ(progress.param_local_steps(), (std::vector<int64_t>{1, 0, 1}));
  progress.set_param_steps(2, 0);
  EXPECT_EQ(progress.param_local_steps()[2], 0);
}

TEST(TrainingProgressTest, CancelUndoesMicroStep) {
  engine::TrainingProgress progress = two_micro_steps();
  progress.begin_micro(1.5, 1);
  progress.cancel_micro();
  EXPECT_FALSE(progress.within_step());
  EXPECT_TRUE(progress.losses().empty());
  EXPECT_NO_THROW(progress.check_backward());
}

TEST(TrainingProgressTest, AnEarlyUpdateIsWithinTheStepAlsoAfterItsBackwardWasCancelled) {
  engine::TrainingProgress progress({}, 1, 3, 5);
  progress.begin_micro(1.5, 1);
  progress.begin_early_update();
  progress.cancel_micro();
  EXPECT_TRUE(progress.within_step());
  EXPECT_THROW(progress.check_no_early_update("engine.set('a')"), UserError);
  make_step(progress, {1, 1, 1});
  EXPECT_FALSE(progress.within_step());
  EXPECT_NO_THROW(progress.check_no_early_update("engine.set('a')"));
  EXPECT_THROW(progress.check_gradients("a"), UserError) << "new weights may have replaced gradients";
  make_step(progress, {1, 1, 1});
  EXPECT_NO_THROW(progress.check_gradients("a"));
}

TEST(TrainingProgressTest, DroppingTheStepEndsAnEarlyUpdate) {
  engine::TrainingProgress progress = two_micro_steps();
  progress.begin_early_update();
  progress.drop_micro_steps();
  EXPECT_FALSE(progress.within_step());
}

TEST(TrainingProgressTest, CountsUpdatesOfTouchedParametersOnly) {
  engine::TrainingProgress progress = two_micro_steps();
  make_step(progress, {1, 0, 1});
  make_step(progress, {1, 0, 0});
  EXPECT_EQ(progress.step(), 2);
  EXPECT_EQ(progress.updates(), 2);
  EXPECT_EQ(progress.samples(), 16);
  EXPECT_EQ(progress.param_steps(), (std::vector<int64_t>{2, 0, 1}));
  EXPECT_EQ(progress.loss(), 0.25);
  EXPECT_EQ(progress.grad_norm(), 2);
  EXPECT_EQ(progress.micro(), 0);
  EXPECT_TRUE(progress.losses().empty());
}

TEST(TrainingProgressTest, SkippedStepCountsAsStepButNotAsUpdate) {
  engine::TrainingProgress progress = two_micro_steps();
  progress.add_tokens(7);
  progress.complete_step(1, 2, false);
  EXPECT_EQ(progress.tokens(), 7);
  progress.end_step(8);
  EXPECT_EQ(progress.tokens(), 0);
  EXPECT_EQ(progress.step(), 1);
  EXPECT_EQ(progress.updates(), 0);
  EXPECT_FALSE(progress.last_step_applied());
  EXPECT_FALSE(progress.updated_in_run());
  EXPECT_EQ(progress.steps_of_run(), 1);
}

TEST(TrainingProgressTest, IsDoneAfterTheLastStepOrASignal) {
  engine::TrainingProgress progress = two_micro_steps();
  progress.restore(4, 4, 32, true);
  EXPECT_FALSE(progress.done());
  make_step(progress, {1, 1, 1});
  EXPECT_TRUE(progress.done());
  engine::TrainingProgress other = two_micro_steps();
  other.stop();
  EXPECT_TRUE(other.done());
}

TEST(TrainingProgressTest, RestoredRunCountsStepsSinceCheckpoint) {
  engine::TrainingProgress progress = two_micro_steps();
  progress.restore(3, 2, 24, false);
  EXPECT_EQ(progress.step(), 3);
  EXPECT_EQ(progress.updates(), 2);
  EXPECT_EQ(progress.samples(), 24);
  EXPECT_FALSE(progress.last_step_applied());
  EXPECT_EQ(progress.steps_of_run(), 0);
  EXPECT_FALSE(progress.updated_in_run());
}

TEST(TrainingProgressTest, ContinuedRunKeepsItsCounters) {
  engine::TrainingProgress before = two_micro_steps();
  make_step(before, {1, 1, 1});
  engine::TrainingProgress progress = two_micro_steps();
  progress.restore(1, 1, 8, true);
  progress.continue_run(before.run());
  EXPECT_EQ(progress.steps_of_run(), 1);
  EXPECT_TRUE(progress.updated_in_run());
  EXPECT_EQ(progress.loss(), 0.25);
}

TEST(TrainingProgressTest, GradientsCanBeReadBetweenStepAndNextBackward) {
  engine::TrainingProgress progress = two_micro_steps();
  EXPECT_THROW(progress.check_gradients("w"), Error);
  make_step(progress, {1, 1, 1});
  EXPECT_NO_THROW(progress.check_gradients("w"));
  progress.begin_micro(1, 1);
  EXPECT_THROW(progress.check_gradients("w"), Error);
  progress.cancel_micro();
  make_step(progress, {1, 1, 1});
  progress.begin_load();
  EXPECT_THROW(progress.check_gradients("w"), Error);
}

TEST(TrainingProgressTest, RejectsBackwardAfterFailedBackwardOrLoad) {
  engine::TrainingProgress progress = two_micro_steps();
  progress.begin_load();
  EXPECT_THROW(progress.check_complete(), Error);
  EXPECT_THROW(progress.check_backward(), Error);
  progress.end_load();
  EXPECT_NO_THROW(progress.check_backward());
  progress.begin_micro(1, 1);
  EXPECT_THROW(progress.check_backward(), Error);
  EXPECT_NO_THROW(progress.check_complete());
}

TEST(TrainingProgressTest, AStepThatFailsDuringItsUpdateEndsTraining) {
  engine::TrainingProgress progress = two_micro_steps();
  make_step(progress, {1, 1, 1});
  progress.step_failed();
  EXPECT_NO_THROW(progress.check_backward()) << "no update had begun";
  progress.begin_update({1, 1, 1});
  progress.step_failed();
  progress.break_off("the first reason counts");
  for (const auto& check : {&engine::TrainingProgress::check_backward, &engine::TrainingProgress::check_complete,
                            &engine::TrainingProgress::check_broken_off}) {
    try {
      (progress.*check)();
      FAIL() << "training continued";
    } catch (const UserError& failure) {
      EXPECT_STREQ(failure.what(),
                   "training stopped in step 2, because engine.step() failed during the update of the weights; resume "
                   "from the last checkpoint");
    }
  }
}

}  // namespace
}  // namespace zr::host
