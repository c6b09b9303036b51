// The loss-scale policy, step by step.
#include "engine/loss_scale.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

namespace {

using zr::host::config::Document;
using zr::host::engine::LossScale;
using zr::host::engine::LossScaleKeys;

// Updates a scale once per letter, '.' for an applied and 'x' for a skipped step; returns the scale after each step as
// a power of two.
std::string powers(LossScale& scale, const std::string& steps) {
  std::string all;
  for (const char step : steps) {
    step == 'x' ? scale.step_skipped() : scale.step_applied();
    all += (all.empty() ? "" : " ") + std::to_string(static_cast<int>(std::log2(scale.value())));
  }
  return all;
}
std::string powers(const LossScaleKeys& keys, const std::string& steps) {
  LossScale scale(keys);
  return powers(scale, steps);
}

TEST(LossScaleTest, StartsAtTheInitialPower) {
  EXPECT_EQ(LossScale(LossScaleKeys{}).value(), 65536);
  LossScaleKeys keys;
  keys.initial_power = 4;
  EXPECT_EQ(LossScale(keys).value(), 16);
}

TEST(LossScaleTest, HalvesOnEveryOverflowAfterHysteresis) {
  EXPECT_EQ(powers(LossScaleKeys{}, "xxx"), "16 15 14");
  LossScaleKeys keys;
  keys.hysteresis = 1;
  EXPECT_EQ(powers(keys, "xx"), "15 14");
  keys.hysteresis = 3;
  EXPECT_EQ(powers(keys, "xxxx"), "16 16 15 14");
}

TEST(LossScaleTest, DoublesOnAGoodStepAfterAWindowOfGoodSteps) {
  LossScaleKeys keys;
  keys.window = 3;
  EXPECT_EQ(powers(keys, "......."), "16 16 16 17 17 17 18") << "at the start";
  EXPECT_EQ(powers(keys, "..xx...."), "16 16 16 15 15 15 15 16") << "an overflow restarts the window";
}

TEST(LossScaleTest, ResetsHysteresisOnlyWhenItDoubles) {
  LossScaleKeys keys;
  keys.window = 3;
  EXPECT_EQ(powers(keys, "x..x"), "16 16 16 15");
  EXPECT_EQ(powers(keys, "x....xx"), "16 16 16 16 17 17 16");
}

TEST(LossScaleTest, ResetsConsecutiveHysteresisOnAnyGoodStep) {
  LossScaleKeys keys;
  keys.consecutive_hysteresis = true;
  EXPECT_EQ(powers(keys, "x.x.xx"), "16 16 16 16 16 15");
}

TEST(LossScaleTest, DoesNotFallBelowTheMinimum) {
  LossScaleKeys keys;
  keys.initial_power = 2;
  keys.hysteresis = 1;
  keys.minimum = 2;
  EXPECT_EQ(powers(keys, "xxx"), "1 1 1");
}

TEST(LossScaleTest, DoesNotChangeAFixedScale) {
  LossScaleKeys keys;
  keys.fixed = 128;
  keys.window = 1;
  EXPECT_EQ(powers(keys, "..xx.."), "7 7 7 7 7 7");
}

TEST(LossScaleTest, IsOneUnlessWeightsAreFp16) {
  LossScaleKeys keys;
  keys.enabled = false;
  keys.window = 1;
  EXPECT_EQ(powers(keys, "..xx"), "0 0 0 0");
}

TEST(LossScaleTest, GivesUpAfterTooManyConsecutiveSkipsForAnyDtype) {
  for (const bool scales : {false, true}) {
    LossScaleKeys keys;
    keys.enabled = scales;
    keys.max_skips = 3;
    LossScale scale(keys);
    powers(scale, "xx.xx");
    EXPECT_FALSE(scale.skip_limit_reached()) << "a good step is between the skips";
    EXPECT_EQ(scale.skips_in_a_row(), 2);
    scale.step_skipped();
    EXPECT_TRUE(scale.skip_limit_reached());
  }
}

TEST(LossScaleTest, WatchesGradientsWhenTheNextSkipMayBeTheLast) {
  LossScaleKeys keys;
  LossScale scale(keys);
  EXPECT_FALSE(scale.checks_gradients()) << "steps have no extra cost without overflows";
  scale.step_skipped();
  EXPECT_TRUE(scale.checks_gradients());
  scale.step_applied();
  EXPECT_FALSE(scale.checks_gradients());
  keys.max_skips = 1;
  EXPECT_TRUE(LossScale(keys).checks_gradients()) << "the first skip is also the last";
}

TEST(LossScaleTest, StaysBelowTheFloatRange) {
  LossScaleKeys keys;
  keys.initial_power = 64;
  keys.window = 1;
  EXPECT_EQ(powers(keys, "...."), "64 64 64 64");
}

TEST(LossScaleTest, HasTheDefaultsOfDeepSpeed) {
  const LossScaleKeys standard,
      read = LossScaleKeys::of(Document::parse("[train]\ndtype = \"fp16\"", "job.toml", {}).check({}, 1));
  EXPECT_TRUE(read.enabled);
  EXPECT_EQ(read.fixed, standard.fixed);
  EXPECT_EQ(read.initial_power, standard.initial_power);
  EXPECT_EQ(read.window, standard.window);
  EXPECT_EQ(read.hysteresis, standard.hysteresis);
  EXPECT_EQ(read.consecutive_hysteresis, standard.consecutive_hysteresis);
  EXPECT_EQ(read.minimum, standard.minimum);
  EXPECT_EQ(read.max_skips, standard.max_skips);
}

TEST(LossScaleTest, ReadsEveryKey) {
  const LossScaleKeys keys = LossScaleKeys::of(
      Document::parse(
          "train = {dtype = \"bf16\", max_skipped_steps = 7}\n[fp16]\nloss_scale = 8.0\ninitial_scale_power = 3\n"
          "loss_scale_window = 5\nhysteresis = 6\nconsecutive_hysteresis = true\nmin_loss_scale = 4.0",
          "job.toml", {})
          .check({}, 1));
  EXPECT_FALSE(keys.enabled);
  EXPECT_EQ(keys.fixed, 8);
  EXPECT_EQ(keys.initial_power, 3);
  EXPECT_EQ(keys.window, 5);
  EXPECT_EQ(keys.hysteresis, 6);
  EXPECT_TRUE(keys.consecutive_hysteresis);
  EXPECT_EQ(keys.minimum, 4);
  EXPECT_EQ(keys.max_skips, 7);
}

}  // namespace
