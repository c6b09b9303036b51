// Resumed jobs with 1-bit Adam, whose compression errors belong to a rank. Update 3 is the first compressed one.
#include "multirank/checkpoint/bodies.hpp"

namespace zr::test {
namespace {

const std::string kOneBitJob = "optimizer=onebit_adam optimizer.onebit_adam.freeze_step=2 ";

class ResumedLocalGradientsTest : public CheckpointTest {
 protected:
  // Six steps at once under zero0, and with a resume after `steps` under other strategies.
  void expect_exact_resume(int ranks, int steps, const std::string& more) {
    const std::string saved = std::to_string(steps);
    run(ranks, "job.name=complete train.steps=6\n", kOneBitJob + more + "strategy=zero0");
    run(ranks, "job.name=half checkpoint.dir=c" + saved + " checkpoint.every=2 train.steps=" + saved + "\n",
        kOneBitJob + more + "strategy=zero1");
    for (const std::string strategy : {"zero1", "zero2 communicator.share_weights=false", "zero0"}) {
      const std::string copy = "d" + saved;
      shell("rm -rf " + copy + " && cp -r c" + saved + " " + copy);
      run(ranks, "job.name=resumed checkpoint.dir=" + copy + " checkpoint.resume=true train.steps=6\n",
          kOneBitJob + more + "strategy=" + strategy);
      EXPECT_EQ(hash("resumed"), hash("complete")) << strategy << ", " << saved << " steps, " << more;
    }
  }
};

TEST_F(ResumedLocalGradientsTest, ContinueExactlyInTheWarmUpAtItsEndAndAfterIt) {
  for (const int steps : {1, 2, 3, 5}) expect_exact_resume(2, steps, "");
}

TEST_F(ResumedLocalGradientsTest, ContinueExactlyWithMastersAndThreeRanks) {
  expect_exact_resume(3, 4, "train.dtype=bf16 checkpoint.async=true ");
}

// "carry" has one copy per rank; "server_error" is one tensor, for which each rank saves the elements that it serves.
TEST_F(ResumedLocalGradientsTest, SaveTheStatesOfEachRank) {
  run(2, "job.name=a checkpoint.dir=c checkpoint.every=2 train.steps=4\n", kOneBitJob + "strategy=zero2");
  const host::checkpoint::Checkpoint before(scratch_.path("c/step-00000002")), after(scratch_.path("c/step-00000004"));
  EXPECT_EQ(before.find("local.carry", "large.weight"), nullptr) << "the warm-up has no such states";
  ASSERT_NE(after.find("local.carry", "large.weight"), nullptr);
  EXPECT_EQ(after.find("local.carry", "large.weight")->shape, (std::vector<int64_t>{2, 577, 36}));
  EXPECT_EQ(after.find("local.server_error", "large.weight")->shape, (std::vector<int64_t>{577, 36}));
  EXPECT_EQ(after.find("local.carry", "unused"), nullptr) << "it never had a gradient";
}

TEST_F(ResumedLocalGradientsTest, ReportErrorsThatAnotherNumberOfRanksLoses) {
  run(2, "job.name=a checkpoint.dir=c checkpoint.every=2 train.steps=4\n", kOneBitJob + "strategy=zero2");
  const Outcome other =
      shell(launch(3, engine_tests::trains,
                   "job.name=b checkpoint.dir=c checkpoint.resume=true train.steps=8 strategy=zero1 " + kOneBitJob));
  EXPECT_EQ(other.code, 0) << other.output;
  EXPECT_NE(other.output.find("the states 'carry', 'server_error' of optimizer 'onebit_adam' are reset, because 2 "
                              "ranks saved them and this job has 3: the compression errors of those ranks are lost, "
                              "and the momentum is kept"),
            std::string::npos)
      << other.output;
  double most = 0;  // before
  for (const auto& [step, loss] : losses("a")) most = std::max(most, std::stod(loss));
  for (const auto& [step, loss] : losses("b")) EXPECT_LT(std::stod(loss), 1.5 * most) << "step " << step;
  const Outcome adamw = run_pair(prints_hash, "checkpoint.dir=c checkpoint.resume=true optimizer=adamw");
  EXPECT_EQ(adamw.code, 0) << adamw.output;
}

}  // namespace
}  // namespace zr::test
