// A rank is killed in each phase of a step with updates during backward: the other rank ends, and the job resumes from
// its last checkpoint to the bits of an uninterrupted training.
#include <gmock/gmock.h>

#include <csignal>
#include <cstdlib>

#include "support/offload_test.hpp"

namespace zr::test {
namespace {

using engine_tests::Run;
using ::testing::HasSubstr;

// In the fourth step, rank 1 kills itself in the phase that KILLED_IN names.
RANK_BODY(is_killed, Run) {
  run.build();
  zr::Engine& engine = *run.engine;
  const char* const phase = std::getenv("KILLED_IN");
  const auto kill_in = [&](const std::string& name) {
    if (phase && name == phase && engine.rank() == 1 && engine.step_index() == 3) ::raise(SIGKILL);
  };
  torch::Tensor first = run.model->named_parameters()["embedding.weight"];  // its gradient is one of the last
  first.register_hook([&](torch::Tensor gradient) {
    kill_in("backward");
    return gradient;
  });
  while (!engine.done()) {
    kill_in("forward");
    engine.backward(run.model->loss(engine.step_index(), engine.micro_index()));
    kill_in("before step()");
    engine.step();
  }
}

class EarlyUpdateKillTest : public OffloadTest,
                            public ::testing::WithParamInterface<std::pair<const char*, const char*>> {};

TEST_P(EarlyUpdateKillTest, ResumesFromTheLastCheckpointToTheSameBits) {
  const std::string how = std::string("strategy=zero2 train.steps=5 ") + GetParam().second;
  train(2, is_killed, "plain", how);
  const std::string job =
      how + " checkpoint.dir=c checkpoint.every=2 job.name=killed" + disk() + "offload.optimizer=" + kFailing;
  // Whether a checkpoint was saved before the rank was killed; without one, training starts again.
  const auto resumes_after = [&](const std::string& environment) {
    fs::remove_all(scratch_.path("c"));
    const Outcome killed = shell(environment + " " + launch(2, is_killed, job));
    EXPECT_NE(killed.code, 0) << environment;
    EXPECT_THAT(killed.output, HasSubstr("signal 9")) << environment;
    const bool has_checkpoint = fs::exists(scratch_.path("c/step-00000002"));
    EXPECT_FALSE(fs::exists(scratch_.path("c/step-00000004"))) << environment;
    const Outcome rest = shell(launch(2, is_killed, job + " checkpoint.resume=true"));
    EXPECT_EQ(rest.code, 0) << environment << rest.output;
    EXPECT_EQ(number("killed", "/overlap/updates_early"), has_checkpoint ? 2 : 4) << environment;
    EXPECT_EQ(hash("killed"), hash("plain")) << environment;
    EXPECT_EQ(losses("killed"), losses("plain")) << environment;
    return has_checkpoint;
  };
  for (const std::string phase : {"forward", "backward", "before step()"})
    EXPECT_TRUE(resumes_after("export KILLED_IN='" + phase + "';"));
  // A rank transfers about 24 tiles per step, and as many to create the states and to save them.
  int later = 0;
  for (const std::string transfer : {"read=kill@90", "write=kill@130", "read=kill@150", "write=kill@150"})
    later += resumes_after("export ZR_TIER_FAULT=rank=1:" + transfer + ";");
  EXPECT_GE(later, 3) << "in the third step or later";
}

// In place; speculative.
INSTANTIATE_TEST_SUITE_P(Update, EarlyUpdateKillTest,
                         ::testing::Values(std::pair("InPlace", "train.nonfinite=stop "),
                                           std::pair("Speculative",
                                                     "offload.speculate=always train.gradient_clipping=1e6 ")),
                         [](const auto& info) { return std::string(info.param.first); });

}  // namespace
}  // namespace zr::test
