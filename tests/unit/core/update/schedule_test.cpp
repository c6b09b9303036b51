// Values computed by hand from the formulas in core/config/README.md.
#include "update/schedule.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "support/sample_keys.hpp"

namespace zr::host {

namespace {
// The learning rates of the given steps; lr is 0.1, the job has 100 steps.
std::vector<double> rates(const std::string& name, const std::vector<std::string>& keys,
                          const std::vector<int64_t>& steps) {
  std::vector<std::string> overrides{"optimizer.lr=0.1", "train.steps=100", "schedule.use=" + name};
  for (const auto& key : keys) overrides.push_back("schedule." + name + "." + key);
  const config::JobConfig config = sample::check("", overrides);
  std::vector<double> all;
  for (const int64_t step : steps) all.push_back(update::learning_rate(config, step));
  return all;
}
void expect_near(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-15) << "value " << i;
}
}  // namespace

TEST(ScheduleTest, ConstantHasItsRateFromTheFirstStep) {
  EXPECT_EQ(rates("constant", {}, {0, 1, 99, 1000}), (std::vector<double>(4, 0.1)));
}

TEST(ScheduleTest, ConstantRisesDuringItsWarmup) {
  expect_near(rates("constant", {"warmup=4"}, {0, 1, 3, 4, 5}), {0.02, 0.04, 0.08, 0.1, 0.1});
}

TEST(ScheduleTest, LinearFallsToItsFinalRatio) {
  expect_near(rates("linear", {}, {0, 25, 99, 100, 500}), {0.1, 0.075, 0.001, 0, 0});
  expect_near(rates("linear", {"warmup=20", "final_ratio=0.5"}, {0, 19, 20, 60, 100}),
              {0.1 / 21, 0.1 * 20 / 21, 0.1, 0.075, 0.05});
}

TEST(ScheduleTest, CosineFallsToItsFinalRatio) {
  expect_near(rates("cosine", {}, {0, 50, 100, 200}), {0.1, 0.05, 0, 0});
  expect_near(rates("cosine", {"warmup=40", "final_ratio=0.2"}, {0, 40, 55, 70, 100}),
              {0.1 / 41, 0.1, 0.1 * (0.2 + 0.8 * (1 + std::sqrt(0.5)) / 2), 0.06, 0.02});
}

TEST(ScheduleTest, OneCycleRisesAndFalls) {
  // Peak at step 0.5 * 101 - 1 = 49.5, end at step 100.
  const config::JobConfig config =
      sample::check("", {"optimizer.lr=0.1", "train.steps=101", "schedule.use=one_cycle", "schedule.one_cycle.rise=0.5",
                         "schedule.one_cycle.start_ratio=0.2", "schedule.one_cycle.final_ratio=0.1"});
  EXPECT_NEAR(update::learning_rate(config, 0), 0.02, 1e-15);
  EXPECT_NEAR(update::learning_rate(config, 33), 0.02 + 0.08 * 0.75,
              1e-15);  // two thirds of the rise: (1 - cos 120) / 2
  EXPECT_NEAR(update::learning_rate(config, 100), 0.01, 1e-15);
  EXPECT_NEAR(update::learning_rate(config, 1000), 0.01, 1e-15);
  for (int64_t step = 1; step < 101; ++step)
    EXPECT_EQ(update::learning_rate(config, step) > update::learning_rate(config, step - 1), step <= 49) << step;
}

TEST(ScheduleTest, OneCycleWithoutARiseStartsAtThePeak) {
  expect_near(rates("one_cycle", {"rise=0", "final_ratio=0"}, {0, 99}), {0.1, 0});
  expect_near(rates("one_cycle", {"rise=1", "start_ratio=0.5"}, {0, 99}), {0.05, 0.1});
}

TEST(ScheduleTest, RangeTestGrowsByItsRateEachInterval) {
  expect_near(rates("range_test", {}, {0, 1000, 2000, 4000}), {1e-3, 1.5e-3, 2e-3, 3e-3});
  expect_near(rates("range_test", {"min_lr=0.01", "step_size=10", "step_rate=2", "staircase=true"}, {0, 9, 10, 25}),
              {0.01, 0.01, 0.03, 0.05});
}

TEST(ScheduleTest, WarmupLRMatchesDeepSpeed) {
  // DeepSpeed's counter is one step behind: updates 0 and 1 have the minimum rate.
  expect_near(rates("WarmupLR", {"warmup_num_steps=8"}, {0, 1, 2, 4, 8, 9, 500}),
              {0, 0, 0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1});  // log 2 / log 8, log 4 / log 8
  expect_near(
      rates("WarmupLR", {"warmup_num_steps=10", "warmup_type=linear", "warmup_min_lr=0.02", "warmup_max_lr=0.12"},
            {0, 1, 6, 11}),
      {0.02, 0.02, 0.07, 0.12});
}

TEST(ScheduleTest, WarmupLRWarmsUpForAtLeastTwoSteps) {
  expect_near(rates("WarmupLR", {"warmup_num_steps=1"}, {0, 1, 2, 3}), {0, 0, 0.1, 0.1});
}

TEST(ScheduleTest, WarmupDecayLRFallsToZero) {
  expect_near(rates("WarmupDecayLR", {"warmup_num_steps=20", "warmup_type=linear"}, {0, 1, 11, 21, 61, 101, 500}),
              {0, 0, 0.05, 0.1, 0.05, 0, 0});  // counters 20, 60 and 100 of 20 ... 100
  expect_near(rates("WarmupDecayLR", {"warmup_num_steps=20", "warmup_type=linear", "total_num_steps=60"}, {41, 61}),
              {0.05, 0});
}

TEST(ScheduleTest, WarmupCosineLRFallsToItsMinimumRatio) {
  expect_near(rates("WarmupCosineLR",
                    {"warmup_num_steps=20", "warmup_type=linear", "warmup_min_ratio=0.5", "cos_min_ratio=0.1"},
                    {0, 1, 11, 20, 21, 60, 100, 500}),
              {0, 0.05, 0.075, 0.0975, 0.1 * (0.1 + 0.9 * (1 + std::cos(M_PI / 80)) / 2), 0.055, 0.01, 0.01});
}

}  // namespace zr::host
