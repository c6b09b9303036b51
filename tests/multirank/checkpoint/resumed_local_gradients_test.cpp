// Resumed jobs with 1-bit Adam, whose compression errors belong to a rank. Update 3 is the first compressed one.
#include <cmath>
#include <set>

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
  std::set<std::string> hashes;
  for (const std::string strategy : {"zero0", "zero1", "zero2 communicator.share_weights=false"}) {
    shell("rm -rf d && cp -r c d");
    run(3, "job.name=other checkpoint.dir=d checkpoint.resume=true train.steps=8\n",
        kOneBitJob + "strategy=" + strategy);
    hashes.insert(hash("other"));
  }
  EXPECT_EQ(hashes.size(), 1u);
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

// What has entered the second moments does not depend on the key of the resumed job.
TEST_F(ResumedLocalGradientsTest, ContinueExactlyWithASmallerFreezeStep) {
  const std::string job = "strategy=zero1 optimizer=onebit_adam optimizer.onebit_adam.freeze_step=";
  run(2, "job.name=complete train.steps=6\n", job + "3");
  run(2, "job.name=half checkpoint.dir=c checkpoint.every=4 train.steps=4\n", job + "3");
  run(2, "job.name=resumed checkpoint.dir=c checkpoint.resume=true train.steps=6\n", job + "1");
  EXPECT_EQ(hash("resumed"), hash("complete"));
}

// Update 5, from a checkpoint with two exact and two compressed updates: the second moment then contains three.
const RankBodyOf<Run> warms_up_again("warms_up_again", [](Run& run) {
  run.build();
  const auto get = [&](zr::TensorKind kind, const std::string& slot = "") {
    return run.engine->get("twice.weight", kind, slot).to(torch::kDouble);
  };
  const auto w = get(zr::TensorKind::value), m = get(zr::TensorKind::state, "exp_avg"),
             v = get(zr::TensorKind::state, "exp_avg_sq");
  run.micro_step();
  const auto g = get(zr::TensorKind::gradient), m1 = 0.9 * m + 0.1 * g, v1 = 0.999 * v + 0.001 * g * g;
  const double c = std::sqrt(1 - std::pow(0.999, 3)), rate = 0.05 / (1 - std::pow(0.9, 5));
  const auto expected = w * (1 - 0.05 * 0.01) - rate * m1 / (v1.sqrt() / c + 1e-8);
  EXPECT_TRUE(torch::allclose(get(zr::TensorKind::value), expected, 1e-4, 1e-5));
});

TEST_F(ResumedLocalGradientsTest, CorrectTheBiasInAnotherWarmUp) {
  const std::string job = "strategy=zero1 checkpoint.dir=c optimizer=onebit_adam optimizer.onebit_adam.freeze_step=";
  const Outcome first = shell(launch(2, engine_tests::trains, job + "2 checkpoint.every=4 train.steps=4"));
  EXPECT_EQ(first.code, 0) << first.output;
  const Outcome again = shell(launch(2, warms_up_again, job + "5 checkpoint.resume=true train.steps=5"));
  EXPECT_EQ(again.code, 0) << again.output;
}

TEST_F(ResumedLocalGradientsTest, NeedAWarmUpAfterACheckpointOfAnotherOptimizer) {
  run(2, "job.name=a checkpoint.dir=c checkpoint.every=4 train.steps=4\n", "strategy=zero1 optimizer=adamw");
  const std::string job =
      "checkpoint.dir=c checkpoint.resume=true train.steps=6 strategy=zero1 optimizer=onebit_adam "
      "optimizer.onebit_adam.freeze_step=";
  const Outcome rejected = shell(launch(2, engine_tests::trains, "job.name=rejected " + job + "2"));
  EXPECT_EQ(rejected.code, 2) << rejected.output;
  EXPECT_NE(rejected.output.find("gradients: update 5 is after the warm-up (freeze_step = 2), but the optimizer states "
                                 "of all parameters are new, because the checkpoint has none of this optimizer or only "
                                 "its weights were loaded; set optimizer.onebit_adam.freeze_step to 4 + the number of "
                                 "updates of a new warm-up, or to 0"),
            std::string::npos)
      << rejected.output;
  run(2, "job.name=exact\n", job + "6");
  run(2, "job.name=automatic\n", job + "0");
  EXPECT_EQ(hash("automatic"), hash("exact"));
}

// The gradients hardly change, so that the variance is stable at the first comparison: of updates 2 and 4.
const RankBodyOf<Run> trains_on_one_batch("trains_on_one_batch", [](Run& run) {
  run.build();
  while (!run.engine->done()) {
    run.engine->backward(run.model->loss(0, run.engine->micro_index()));
    run.engine->step();
  }
});

TEST_F(ResumedLocalGradientsTest, SLOW_ContinueAWarmUpThatEndsByItself) {
  const auto train = [&](const std::string& more) {
    const Outcome done = shell(launch(2, trains_on_one_batch,
                                      "optimizer=onebit_adam optimizer.onebit_adam.freeze_step=0 optimizer.lr=1e-5 "
                                      "optimizer.onebit_adam.beta2=0.5 " +
                                          more));
    EXPECT_EQ(done.code, 0) << done.output;
    return done.output;
  };
  EXPECT_NE(train("job.name=complete train.steps=7 strategy=zero0").find("so the warm-up ends with update 4"),
            std::string::npos);
  for (const std::string steps : {"3", "5"}) {
    const std::string folder = "checkpoint.dir=c" + steps + " strategy=";
    train(folder + "zero1 checkpoint.every=8 train.steps=" + steps);
    train(folder + "zero2 checkpoint.resume=true train.steps=7 job.name=resumed" + steps);
    EXPECT_EQ(hash("resumed" + steps), hash("complete")) << steps;
  }
}

}  // namespace
}  // namespace zr::test
