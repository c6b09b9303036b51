// A rank is killed in each phase of a step with updates during backward: the other rank ends, and the job resumes from
// its last checkpoint to the bits of an uninterrupted training.
#include <gmock/gmock.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "support/offload_test.hpp"

namespace zr::test {
namespace {

using engine_tests::Run;
using std::chrono::milliseconds;
using ::testing::HasSubstr;

// The rank that is killed.
int killed_rank() {
  const char* const rank = std::getenv("KILLED_RANK");
  return rank ? std::atoi(rank) : 1;
}

// One rank kills itself while it waits for the other in the exchange of the ranks' statistics: the other comes later.
void be_killed_in_exchange(int rank) {
  if (rank != killed_rank()) return std::this_thread::sleep_for(milliseconds(600));
  std::thread([] {
    std::this_thread::sleep_for(milliseconds(300));
    ::raise(SIGKILL);
  }).detach();
}

// One rank kills itself as soon as rank 0 has made the folder of the second checkpoint.
void be_killed_in_save(int rank) {
  if (rank != killed_rank()) return;
  const auto entries = [] { return std::distance(fs::directory_iterator("c"), fs::directory_iterator()); };
  std::thread([entries, before = entries()] {
    while (entries() <= before) std::this_thread::sleep_for(milliseconds(1));
    ::raise(SIGKILL);
  }).detach();
}

// In the fourth step, one rank kills itself in the phase that KILLED_IN names.
RANK_BODY(is_killed, Run) {
  run.build();
  zr::Engine& engine = *run.engine;
  const char* const phase = std::getenv("KILLED_IN");
  const auto is_in = [&](const std::string& name) { return phase && name == phase && engine.step_index() == 3; };
  const auto kill_in = [&](const std::string& name) {
    if (is_in(name) && engine.rank() == killed_rank()) ::raise(SIGKILL);
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
    if (is_in("exchange")) be_killed_in_exchange(engine.rank());
    if (is_in("save")) be_killed_in_save(engine.rank());
    engine.step();
  }
}

struct KilledJob {
  const char *name, *keys, *tier;
  int rank = 1;
};

class EarlyUpdateKillTest : public OffloadTest, public ::testing::WithParamInterface<KilledJob> {
 protected:
  // Whether a checkpoint was saved before the rank was killed; without one, training starts again. more: keys of the
  // job that is killed.
  bool resumes_after(const std::string& environment, const std::string& more = "") {
    const std::string job = how_ + " checkpoint.dir=c checkpoint.every=2 job.name=killed" + states_ + " ";
    fs::remove_all(scratch_.path("c"));
    const Outcome killed = shell("export KILLED_RANK=" + std::to_string(GetParam().rank) + "; " + environment + " " +
                                 launch(2, is_killed, job + more));
    EXPECT_NE(killed.code, 0) << environment;
    EXPECT_THAT(killed.output, HasSubstr("signal 9")) << environment;
    const bool has_checkpoint = fs::exists(scratch_.path("c/step-00000002"));
    EXPECT_FALSE(fs::exists(scratch_.path("c/step-00000004"))) << environment;
    const Outcome rest = shell(launch(2, is_killed, job + "checkpoint.resume=true"));
    EXPECT_EQ(rest.code, 0) << environment << rest.output;
    const int64_t updates = has_checkpoint ? 2 : 4;
    EXPECT_EQ(number("killed", "/overlap/updates_early"), updates) << environment;
    EXPECT_EQ(hash("killed"), hash("plain")) << environment;
    EXPECT_EQ(losses("killed"), losses("plain")) << environment;
    return has_checkpoint;
  }
  const bool on_disk_ = GetParam().tier == std::string("nvme");
  const std::string how_ = std::string("strategy=zero2 train.steps=5 ") + GetParam().keys,
                    states_ = on_disk_ ? disk() + "offload.optimizer=" + kFailing : states("cpu");
};

TEST_P(EarlyUpdateKillTest, ResumesFromTheLastCheckpointToTheSameBits) {
  train(2, is_killed, "plain", how_);
  for (const std::string phase : {"forward", "backward", "before step()", "exchange"})
    EXPECT_TRUE(resumes_after("export KILLED_IN='" + phase + "';"));
  EXPECT_TRUE(
      resumes_after("export KILLED_IN=gather;", "strategy=" ZR_BUILD_DIR "/tests/plugins/zr_strategy_killed.so"));
  if (!on_disk_) return;
  // A slow disk makes the save longer: it reads the states from there.
  EXPECT_TRUE(resumes_after("export KILLED_IN=save ZR_TIER_FAULT=slow=2ms;", "checkpoint.async=false"));
  // A rank transfers about 24 tiles per step, and about 80 parts of tiles to create the states and to save them.
  int later = 0;
  for (const std::string transfer : {"read=kill@90", "write=kill@130", "read=kill@150", "write=kill@150"})
    later += resumes_after("export ZR_TIER_FAULT=rank=" + std::to_string(GetParam().rank) + ":" + transfer + ";");
  EXPECT_GE(later, 3) << "in the third step or later";
}

const char* const kStopsAtInfinity = "train.nonfinite=stop ";
INSTANTIATE_TEST_SUITE_P(SLOW_Update, EarlyUpdateKillTest,
                         ::testing::Values(KilledJob{"OnDisk", kStopsAtInfinity, "nvme"},
                                           KilledJob{"InHostMemory", kStopsAtInfinity, "cpu"},
                                           KilledJob{"OnDiskOnRank0", kStopsAtInfinity, "nvme", 0}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace zr::test
