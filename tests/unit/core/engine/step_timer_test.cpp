// Rows of metrics.jsonl, and counts that continue those of the previous sessions of a run.
#include "engine/step_timer.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;

struct StepTimerFixture {
  StepTimerFixture() { log.accept(); }
  nlohmann::json row() const {
    std::ifstream file(log.folder() + "/metrics.jsonl");
    std::string line, last;
    while (std::getline(file, line)) last = line;
    return nlohmann::json::parse(last);
  }
  OneRankJob rig;
  state::ShardedState state{rig.context(), rig.job.host, rig.job.plugins.tiers, nullptr};
  run::RunLog log{rig.job.config(), "", 1, 0};
  engine::TrainingProgress progress{rig.job.config(), 2};
  engine::StepTimer steps{rig.context(), state, log, nullptr, nullptr};
};

TEST(StepTimerTest, WritesARowPerStep) {
  StepTimerFixture f;
  engine::GlobalStats global;
  global.tokens = 12;
  f.progress.complete_step(0.25, 2, true);
  f.steps.step(global, 0.5, f.progress);
  const nlohmann::json row = f.row();
  EXPECT_EQ(row.at("step"), 1);
  EXPECT_EQ(row.at("loss"), 0.25);
  EXPECT_EQ(row.at("grad_norm"), 2);
  EXPECT_EQ(row.at("lr"), 0.5);
  EXPECT_EQ(row.at("tokens"), 12);
  EXPECT_EQ(row.at("communication_bytes"), 0) << "one rank";
  EXPECT_FALSE(row.contains("skipped"));
}

TEST(StepTimerTest, MarksSkippedStepAndWritesNullNorm) {
  StepTimerFixture f;
  engine::GlobalStats global;
  global.non_finite = 1;
  f.progress.complete_step(0.25, INFINITY, false);
  f.steps.step(global, 0.5, f.progress);
  EXPECT_EQ(f.row().at("skipped"), true);
  EXPECT_TRUE(f.row().at("grad_norm").is_null());
}

TEST(StepTimerTest, ContinuesTheCountsOfThePreviousSessions) {
  StepTimerFixture f;
  comm::CommVolume before;
  before.bytes[ZR_ALL_GATHER] = 100;
  run::Overlap overlap{};
  overlap.collectives = 7;
  overlap.early = 3;
  f.steps.continue_from(before, overlap);
  EXPECT_EQ(f.steps.volume().total(), 100);
  engine::GradientFlow gradients(f.rig.context(), nullptr);
  const engine::NormBlocks norm(f.rig.context(), f.state.slices());
  const run::Overlap all = f.steps.overlap(gradients, norm, nullptr);
  EXPECT_EQ(all.collectives, 7);
  EXPECT_EQ(all.early, 3);
  EXPECT_EQ(all.norm_blocks, 3) << "1500 and 40 elements in blocks of 1024";
}

}  // namespace
}  // namespace zr::testing
