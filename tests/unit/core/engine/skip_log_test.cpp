// What is logged of skipped steps, and the error that ends a job in which every step is skipped.
#include "engine/skip_log.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;
using ::testing::HasSubstr;

struct SkipLogFixture {
  explicit SkipLogFixture(const std::vector<std::string>& overrides = {})
      : rig(overrides), progress(rig.job.config(), 2) {}
  // Counts a skipped step and reports it; returns the log line, "" if none was logged.
  std::string skip(const engine::GlobalStats& global) {
    progress.loss_scale().step_skipped();
    progress.complete_step(1, 1, false);
    ::testing::internal::CaptureStderr();
    log.report(global, progress);
    return ::testing::internal::GetCapturedStderr();
  }
  OneRankJob rig;
  engine::SkipLog log{rig.context()};
  engine::TrainingProgress progress;
};

engine::GlobalStats overflow_in(int64_t first_param) {
  engine::GlobalStats global;
  global.first_param = first_param;
  return global;
}

TEST(SkipLogTest, NamesTheParameterOfTheReducedGradient) {
  SkipLogFixture f;
  EXPECT_EQ(f.skip(overflow_in(1)),
            "zeroth: warning: step 1 skipped, weights unchanged: the reduced gradient of 'b' is not finite\n");
}

TEST(SkipLogTest, NamesTheRankWhoseGradientOverflowed) {
  SkipLogFixture f;
  engine::GlobalStats global = overflow_in(1);
  global.first_local_param = 0;
  global.non_finite_rank = 3;
  global.loss_rank = 2;
  EXPECT_EQ(f.skip(global),
            "zeroth: warning: step 1 skipped, weights unchanged: the gradient of 'a' is not finite on rank 3; the loss "
            "of rank 2 is not finite either\n");
}

TEST(SkipLogTest, GivesTheLossScaleOfFp16) {
  SkipLogFixture f({"train.dtype=fp16", "fp16.hysteresis=1"});
  EXPECT_THAT(f.skip(overflow_in(0)), HasSubstr("is not finite; the loss scale is now 32768\n"));
}

TEST(SkipLogTest, LogsTheFirstTenStepsAndThenOnePerHundred) {
  SkipLogFixture f({"train.max_skipped_steps=1000"});
  int lines = 0;
  for (int step = 1; step <= 10; ++step) lines += !f.skip(overflow_in(0)).empty();
  EXPECT_EQ(lines, 10);
  for (int step = 11; step < 110; ++step) ASSERT_EQ(f.skip(overflow_in(0)), "") << step;
  EXPECT_EQ(f.skip(overflow_in(0)),
            "zeroth: warning: step 110 skipped, weights unchanged: the reduced gradient of 'a' is not finite; steps "
            "skipped since the last such line: 99\n");
}

TEST(SkipLogTest, TooManySkippedStepsAreAnErrorThatNamesKeyParameterAndRemedy) {
  SkipLogFixture f({"train.max_skipped_steps=2"});
  for (int step = 1; step <= 2; ++step) f.skip(overflow_in(0));
  engine::GlobalStats global = overflow_in(0);
  global.first_local_param = 1;
  global.non_finite_rank = 0;
  EXPECT_EQ(failure_of([&] { f.log.fail_too_many_skips(global, f.progress); }),
            "gradients were not finite in 2 steps in a row, as many as train.max_skipped_steps (command line) "
            "allows: 'b' was the first parameter that overflowed, on rank 0; the weights "
            "are those after step 0; check the data of that rank, lower optimizer.lr or set train.gradient_clipping");
}

}  // namespace
}  // namespace zr::testing
