// The checkpoint and the run folder that commit 8e08ee99 wrote (written_by_8e08ee99/README.md).
#include "multirank/checkpoint/bodies.hpp"

namespace zr::test {
namespace {

const std::string kModel = "parity.model=convolutional train.dtype=bf16 ";

class OldFormatTest : public CheckpointTest {
 protected:
  OldFormatTest() {
    const fs::path written = ZR_SOURCE_DIR "/tests/multirank/checkpoint/written_by_8e08ee99";
    const fs::path run = scratch_.folder() / "runs/a";
    fs::copy(written / "checkpoints", scratch_.folder() / "c", fs::copy_options::recursive);
    fs::create_directories(run);
    fs::copy(written / "run", run / "1");
    fs::create_symlink("1", run / "latest");
    for (const char* file : {"config.toml", "metrics.jsonl", "summary.json"})
      fs::create_symlink(fs::path("latest") / file, run / file);
  }
};

TEST_F(OldFormatTest, CheckpointsLoadBitForBit) {
  EXPECT_EQ(shell(zeroth_bin() + "verify c").code, 0);
  const auto written = contents(host::checkpoint::find_checkpoint(scratch_.path("c")));
  ASSERT_GT(written.size(), 10u);
  for (const std::string strategy : {"zero0", "zero3"}) {
    const Outcome done = run_pair(resaves, kModel + "strategy=" + strategy);
    ASSERT_EQ(done.code, 0) << done.output;
    EXPECT_EQ(contents(done.lines().back()) == written, true) << strategy << " changes weights or states";
    fs::remove_all(scratch_.path("c-again"));
  }
  const Outcome loaded = run_pair(prints_hash, kModel + "checkpoint.dir=c checkpoint.resume=true");
  EXPECT_EQ(loaded.lines().back(), "step 2 hash " + hash("a")) << loaded.output;
}

// A job that continues the run writes a folder of its own, with the rows of the earlier steps.
TEST_F(OldFormatTest, JobsContinueTheRun) {
  const Json before = summary("a");
  run(2, "job.name=a checkpoint.dir=c checkpoint.resume=true\n", kModel);
  EXPECT_EQ(summary("a/1"), before);
  EXPECT_EQ(summary("a").at("steps"), 4);
  EXPECT_EQ(losses("a/1").size(), 2u);
  const auto all = losses("a"), written = losses("a/1");
  EXPECT_EQ(all.size(), 4u);
  for (const auto& [step, loss] : written) EXPECT_EQ(all.at(step), loss) << step;
}

}  // namespace
}  // namespace zr::test
