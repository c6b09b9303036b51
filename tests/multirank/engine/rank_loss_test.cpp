// A training job with zr::Engine over comm_shm in which a rank is killed or stopped, or which is interrupted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "support/launch_job.hpp"
#include "support/train_bodies.hpp"

namespace {

using testing::HasSubstr;
using zr::test::eventually;
using zr::test::gone;
using zr::test::Job;
using zr::test::milliseconds;
using zr::test::Scene;
namespace fs = std::filesystem;

class EngineRankLossTest : public testing::Test {
 protected:
  // Starts three ranks that train indefinitely; returns after they have completed more than three steps.
  void start(const std::string& override_with = "communicator.timeout=5min") {
    before_ = shared_memory();
    std::vector<std::string> words = zr::test::rank_words(engine_tests::trains);
    words.insert(words.end(), {ZR_SOURCE_DIR "/tests/multirank/parity/parity.toml", "job.name=run",
                               "job.runs=\"" + scene_.folder().string() + "\"", "job.threads=1", "job.ranks=3",
                               "train.steps=1000000", "strategy=zero1", override_with});
    job_ = std::make_unique<Job>(scene_, zr::test::launch_of(3, words));
    ASSERT_TRUE(eventually([&] { return steps() > 3; }, milliseconds(60000))) << job_->err();
    std::ifstream children("/proc/" + std::to_string(job_->pid()) + "/task/" + std::to_string(job_->pid()) +
                           "/children");
    for (pid_t pid; children >> pid;) ranks_.push_back(pid);
    ASSERT_EQ(ranks_.size(), 3u);
  }
  int64_t steps() const {
    std::ifstream in(scene_.folder() / "run" / "metrics.jsonl");
    return std::count(std::istreambuf_iterator<char>(in), {}, '\n');
  }
  // Without OpenMPI's files, which tests of comm_mpi that run at the same time make and remove.
  static std::set<std::string> shared_memory() {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator("/dev/shm"))
      if (!entry.path().filename().string().starts_with("vader_segment")) names.insert(entry.path());
    return names;
  }
  void expect_nothing_left() {
    for (const pid_t pid : ranks_) EXPECT_TRUE(eventually([&] { return gone(pid); })) << pid;
    EXPECT_EQ(shared_memory(), before_);
    EXPECT_FALSE(fs::exists(scene_.folder() / "run" / "summary.json")) << "a failed run must have no summary";
  }

  Scene scene_;
  std::unique_ptr<Job> job_;
  std::vector<pid_t> ranks_;
  std::set<std::string> before_;
};

TEST_F(EngineRankLossTest, KilledRankEndsJobWithinFiveSecondsAndIsNamed) {
  for (const std::size_t victim : {0, 2}) {
    ranks_.clear();
    start();
    if (HasFatalFailure()) return;
    kill(ranks_[victim], SIGKILL);
    EXPECT_EQ(job_->wait(milliseconds(5000)), 4) << job_->err();
    EXPECT_THAT(job_->err(), HasSubstr("rank " + std::to_string(victim) + " (pid " + std::to_string(ranks_[victim]) +
                                       ") was killed by signal 9 (SIGKILL)"));
    for (std::size_t rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_THAT(job_->err(), testing::ContainsRegex("rank " + std::to_string(rank) + ".*(waits|computing)"))
          << "the report must show what each survivor was doing";
    }
    expect_nothing_left();
    fs::remove_all(scene_.folder() / "run");
  }
}

TEST_F(EngineRankLossTest, StoppedRankIsReportedAfterTimeout) {
  start("communicator.timeout=1s");
  if (HasFatalFailure()) return;
  kill(ranks_[1], SIGSTOP);
  EXPECT_EQ(job_->wait(milliseconds(15000)), 4) << job_->err();
  EXPECT_THAT(job_->err(), HasSubstr("waited longer than communicator.timeout (1.0s) in "));
  EXPECT_THAT(job_->err(), HasSubstr("rank 1 (pid " + std::to_string(ranks_[1]) + ") has not answered for"));
  EXPECT_THAT(job_->err(), HasSubstr("its process is stopped (T)"));
  expect_nothing_left();
}

TEST_F(EngineRankLossTest, CtrlCEndsJobAndLeavesNoProcessesOrFiles) {
  start();
  if (HasFatalFailure()) return;
  kill(job_->pid(), SIGINT);
  EXPECT_EQ(job_->wait(milliseconds(10000)), 130) << job_->err();
  expect_nothing_left();
}

}  // namespace
