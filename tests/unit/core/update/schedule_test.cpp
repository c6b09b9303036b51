// Values computed by hand from the formulas in docs/numerics.md.
#include "update/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <regex>

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

TEST(ScheduleTest, RisesFromAStepAndARatioInEqualStepsOrLogarithmically) {
  expect_near(rates("constant", {"warmup=6", "warmup_from=2", "start_ratio=0.5"}, {0, 2, 3, 5, 6, 7}),
              {0.05, 0.05, 0.0625, 0.0875, 0.1, 0.1});
  expect_near(rates("constant", {"warmup=9", "warmup_from=1", "warmup_type=log"}, {0, 1, 2, 4, 8, 9, 500}),
              {0, 0, 0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1});  // log 2 / log 8, log 4 / log 8
  expect_near(rates("constant", {"warmup=3", "warmup_from=2", "warmup_type=log"}, {2, 3}), {0, 0.1});
}

TEST(ScheduleTest, FallsBetweenTwoSteps) {
  expect_near(rates("linear", {"decay_from=10", "decay_until=20"}, {0, 10, 15, 20, 99}), {0.1, 0.1, 0.05, 0, 0});
  expect_near(rates("cosine", {"decay_from=10", "decay_until=20", "final_ratio=0.2"}, {0, 10, 15, 20, 99}),
              {0.1, 0.1, 0.06, 0.02, 0.02});
  expect_near(rates("linear", {"decay_from=20", "decay_until=20"}, {19, 20}), {0.1, 0});
  expect_near(rates("linear", {"warmup=200"}, {99, 199, 200}), {0.1 * 100 / 201, 0.1 * 200 / 201, 0});
}

namespace {
// DeepSpeed's schedules, as Zeroth had them until they were written with its own keys.
struct DeepSpeed {
  std::string name, type = "log";
  int64_t warmup = 1000, total = 100;
  double lr = 0.1, low = 0, high = 0.1, min_ratio = 0, cos_min_ratio = 1e-4;

  double rate(int64_t step) const {
    const int64_t i = step - 1, w = std::max<int64_t>(2, warmup);
    const double u = type == "log" ? std::log(double(i + 1)) / std::log(double(w)) : double(i) / double(w);
    if (name == "WarmupCosineLR") {
      if (i < 0) return 0;
      if (i < w) return lr * (min_ratio + (1 - min_ratio) * u);
      const double part = std::min(1.0, double(i - w + 1) / double(std::max<int64_t>(1, total - w)));
      return lr * (cos_min_ratio + (1 - cos_min_ratio) * (1 + std::cos(M_PI * part)) / 2);
    }
    if (i < 0) return low;
    double part = i < w ? u : 1;
    if (i >= w && name == "WarmupDecayLR") part = std::max(0.0, double(total - i) / std::max(1.0, double(total - w)));
    return low + (high - low) * part;
  }
  std::vector<std::string> keys() const {
    const std::string table = "schedule." + name + ".";
    std::vector<std::string> all{"optimizer.lr=" + std::to_string(lr), "train.steps=100", "schedule.use=" + name,
                                 table + "warmup_num_steps=" + std::to_string(warmup), table + "warmup_type=" + type};
    if (name != "WarmupLR" && total != 100) all.push_back(table + "total_num_steps=" + std::to_string(total));
    if (name == "WarmupCosineLR") {
      all.push_back(table + "warmup_min_ratio=" + std::to_string(min_ratio));
      all.push_back(table + "cos_min_ratio=" + std::to_string(cos_min_ratio));
    } else {
      all.push_back(table + "warmup_min_lr=" + std::to_string(low));
      all.push_back(table + "warmup_max_lr=" + std::to_string(high));
    }
    return all;
  }
};

// The assignments that the error about DeepSpeed's name proposes, as overrides.
std::vector<std::string> proposed(const DeepSpeed& of) {
  std::string text;
  try {
    sample::check("", of.keys());
  } catch (const std::exception& error) {
    text = error.what();
  }
  const std::regex form(
      "schedule\\.use: \"" + of.name +
      "\" is DeepSpeed's name; for the same rates write use = \"(\\w+)\" in \\[schedule\\] and (.*) in "
      "\\[schedule\\.\\w+\\](, and lr = (\\S+) in \\[optimizer\\])?(; only the first update differs.*)?$");
  std::smatch found;
  EXPECT_TRUE(std::regex_search(text, found, form)) << text;
  std::vector<std::string> overrides{"train.steps=100", "schedule.use=" + found[1].str(),
                                     "optimizer.lr=" + (found[4].matched ? found[4].str() : std::to_string(of.lr))};
  const std::string keys = found[2];
  const std::regex key("(\\w+) = ([^,]+)");
  for (std::sregex_iterator at(keys.begin(), keys.end(), key), end; at != end; ++at)
    overrides.push_back("schedule." + found[1].str() + "." + (*at)[1].str() + "=" + (*at)[2].str());
  return overrides;
}
}  // namespace

TEST(ScheduleTest, DeepSpeedsNamesAreErrorsWithKeysForTheSameRates) {
  int compared = 0;
  for (const std::string name : {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"})
    for (const std::string type : {"log", "linear"})
      for (const int64_t warmup : {1, 2, 10, 60, 120})
        for (const int64_t total : {100, 60, 11, 5})
          for (const bool from_zero : {true, false}) {
            DeepSpeed of{name, type, warmup, total};
            if (!from_zero) of.low = 0.02, of.high = 0.125, of.min_ratio = 0.5, of.cos_min_ratio = 0.25;
            std::vector<std::string> overrides = proposed(of);
            for (std::string& one : overrides) std::erase(one, '"');
            const config::JobConfig config = sample::check("", overrides);
            // The first step of WarmupCosineLR has no rate, whatever its warmup_min_ratio.
            for (int64_t step = name == "WarmupCosineLR" && !from_zero ? 1 : 0; step < 200; ++step, ++compared)
              ASSERT_NEAR(update::learning_rate(config, step), of.rate(step), 2e-16)
                  << name << " " << type << " warm-up " << warmup << " of " << total << ", step " << step;
          }
  EXPECT_GE(compared, 40000);
}

TEST(ScheduleTest, DeepSpeedsDefaultOfTheFullRateDependsOnTheSchedule) {
  const auto problem_of = [](const std::string& name, const std::string& least) -> std::string {
    try {
      sample::check("", {"optimizer.lr=0.1", "schedule.use=" + name, "schedule." + name + ".warmup_min_lr=" + least});
    } catch (const std::exception& error) {
      return error.what();
    }
    return "accepted";
  };
  const std::string decay = problem_of("WarmupDecayLR", "0.0005"), warmup = problem_of("WarmupLR", "0.05");
  EXPECT_NE(decay.find("final_ratio = 0.5 in [schedule.linear], and lr = 0.001 in [optimizer]"), decay.npos) << decay;
  EXPECT_NE(
      warmup.find("start_ratio = 0.5 in [schedule.constant]; without warmup_max_lr the full rate is optimizer.lr"),
      warmup.npos)
      << warmup;
}

}  // namespace zr::host
