// Faults of a disk tier in steps whose states are updated during backward.
#include <gmock/gmock.h>

#include <iostream>

#include "support/offload_test.hpp"
#include "support/user_error.hpp"

namespace zr::test {
namespace {

using engine_tests::Run;
using ::testing::HasSubstr;

class EarlyUpdateFaultTest : public OffloadTest {
 protected:
  // All states of a rank are updated early, from the second step on.
  std::string job(const std::string& name) const {
    return "parity.model=wide strategy=zero2 train.steps=4 train.gradient_accumulation=1 train.nonfinite=stop "
           "job.name=" +
           name + " " + disk() + "offload.optimizer=" + kFailing;
  }
};

// The tier of rank 1 fails in an update during backward. Its step() throws that error; the other rank's names the rank.
RANK_BODY(reports_a_failed_update, Run) {
  run.build();
  const bool has_failed = run.engine->rank() == 1;
  std::string text;
  try {
    run.train();
  } catch (const Error& error) {
    text = error.what();
    EXPECT_EQ(error.exit_code(), has_failed ? 3 : 4) << text;
  }
  EXPECT_THAT(text, HasSubstr(has_failed ? "states of '" : "engine.step(): the update of step "));
  EXPECT_THAT(text, HasSubstr(has_failed ? "offload 'nvme'" : " failed on rank 1; see that rank's error"));
  EXPECT_THAT(user_error_of([&] { run.engine->save("later"); }), HasSubstr("because its update failed on rank 1"));
}

// A rank makes about 90 calls of each kind per step, and reads nothing in the first one: all these are in early
// updates.
TEST_F(EarlyUpdateFaultTest, AFailedUpdateOfOneRankIsReportedOnAllRanks) {
  for (const std::string fault : {"read=EIO@40", "write=EIO@130", "flip@130"}) {
    const Outcome done =
        shell("ZR_TIER_FAULT=rank=1:" + fault + " " + launch(2, reports_a_failed_update, job("fault")));
    EXPECT_EQ(done.code, 0) << fault << done.output;
  }
}

// Each rank prints why training stopped before it ends: when the first one has ended, the launcher ends the other.
RANK_BODY(says_why_training_stopped, Run) {
  run.build();
  try {
    run.train();
  } catch (const Error&) {
    std::cerr << user_error_of([&] { run.engine->save("later"); }) << std::endl;
    throw;
  }
}

// A save reads the states once more, so these calls are in the third step, after the checkpoint of the second. What was
// written wrongly in the third step is read in the fourth.
TEST_F(EarlyUpdateFaultTest, SLOW_AFaultOfOneRankEndsTheJobAndTheCheckpointResumes) {
  train(2, engine_tests::trains, "plain", job("plain") + "offload.overlap=false ");
  for (const std::string rank : {"0", "1"})
    for (const std::string fault : {"read=EIO@200", "write=EIO@200", "write=ENOSPC@200", "flip@200"}) {
      SCOPED_TRACE(rank + fault);
      fs::remove_all(scratch_.path("c"));
      const std::string saves = job("f") + "checkpoint.dir=c checkpoint.every=2 ";
      const Outcome failed =
          shell("ZR_TIER_FAULT=rank=" + rank + ":" + fault + " " + launch(2, says_why_training_stopped, saves));
      EXPECT_EQ(failed.code, 3) << failed.output;
      EXPECT_THAT(failed.output, HasSubstr("offload 'nvme'"));
      EXPECT_THAT(failed.output,
                  HasSubstr(std::string("training stopped in step ") + (fault == "flip@200" ? "4" : "3") +
                            ", because its update failed on rank " + rank));
      EXPECT_TRUE(fs::exists(scratch_.path("c/step-00000002")));
      const Outcome rest = shell(launch(2, engine_tests::trains, saves + "checkpoint.resume=true"));
      ASSERT_EQ(rest.code, 0) << rest.output;
      EXPECT_EQ(hash("f"), hash("plain"));
    }
}

TEST_F(EarlyUpdateFaultTest, SLOW_FaultsThatTheTierHandlesKeepResultsBitIdentical) {
  train(2, engine_tests::trains, "plain", job("plain") + "offload.overlap=false ");
  for (const std::string fault :
       {"read=SHORT", "write=SHORT", "slow=2ms", "uring=EPERM", "unnamed=EOPNOTSUPP", "rank=1:slow=2ms"}) {
    const Outcome done = shell("ZR_TIER_FAULT=" + fault + " " + launch(2, engine_tests::trains, job("f")));
    ASSERT_EQ(done.code, 0) << fault << done.output;
    EXPECT_EQ(hash("f"), hash("plain")) << fault;
    EXPECT_EQ(number("f", "/overlap/updates_early"), 3) << fault;
    EXPECT_EQ(number("f", "/overlap/states_early"), number("f", "/overlap/states")) << fault;
  }
}

}  // namespace
}  // namespace zr::test
