// Signals to a launcher whose ranks save on signals, and the launcher's report about a job with a single rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/launch_job.hpp"

using namespace zr::test;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

namespace {
bool all_train(Page& page, int ranks) {
  for (int rank = 0; rank < ranks; ++rank)
    if (page.ranks[size_t(rank)].step < 3) return false;
  return true;
}

// The exit code of a launch_rank job, started with `option`, after `signal` to its launcher.
int code_after(int ranks, int signal, const std::string& option) {
  Scene scene;
  Job job(scene, launched(ranks, {option}));
  EXPECT_TRUE(eventually([&] { return all_train(scene.page(), ranks); }));
  kill(job.pid(), signal);
  const int code = job.wait();
  EXPECT_EQ(job.err(), "");
  for (int rank = 0; code == 0 && rank < ranks; ++rank)
    EXPECT_THAT(job.out(), HasSubstr("rank " + std::to_string(rank) + " of " + std::to_string(ranks)));
  return code;
}

TEST(ZerothLaunchSignal, ReturnsZeroAfterRanksSaved) {
  for (const int ranks : {1, 2, 3}) EXPECT_EQ(code_after(ranks, SIGTERM, "save_on_signal=1"), 0) << ranks << " ranks";
  EXPECT_EQ(code_after(1, SIGINT, "save_on_signal=1"), 0);
}

TEST(ZerothLaunchSignal, ReturnsZeroIfRankAnnouncesSaveAfterSignal) {
  EXPECT_EQ(code_after(1, SIGTERM, "save_on_signal=2"), 0);
}

TEST(ZerothLaunchSignal, ReturnsSignalExitCodeIfRanksDoNotSave) {
  for (const int ranks : {1, 2}) EXPECT_EQ(code_after(ranks, SIGTERM, "save_on_signal=0"), 128 + SIGTERM);
  EXPECT_EQ(code_after(2, SIGHUP, "save_on_signal=1"), 128 + SIGHUP);
}

TEST(ZerothLaunch, SingleRankFailureAfterTrainingIsNotReportedAsNeverJoined) {
  Scene scene;
  Job job(scene, launched(1, {"fail_rank=0", "fail_step=5", "fail_code=3"}));
  EXPECT_EQ(job.wait(), 3);
  EXPECT_THAT(job.err(), Not(HasSubstr("before it joined")));
  EXPECT_THAT(job.err(), ContainsRegex("zeroth: error: rank 0 .pid [0-9]+. ended with exit code 3"));
}

TEST(ZerothLaunch, KilledSingleRankIsReportedWithItsStep) {
  Scene scene;
  Job job(scene, launched(1, {"busy_rank=0", "busy_step=4"}));
  ASSERT_TRUE(eventually([&] { return scene.page().ranks[0].step == 4; }));
  std::this_thread::sleep_for(milliseconds(300));
  kill(scene.page().ranks[0].pid, SIGKILL);
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), ContainsRegex("killed by signal 9 .SIGKILL.; last seen: computing for [0-9.]+s.*, step 4"));
}

TEST(ZerothLaunch, ReportsDisabledLoopbackInterface) {
  if (geteuid() != 0) GTEST_SKIP() << "creating a network namespace needs root";
  Scene scene;
  const auto begin = Clock::now();
  std::vector<std::string> command = launched(2, {"steps=3"});
  command.insert(command.begin(), {"unshare", "-n"});
  Job job(scene, command);
  const int code = job.wait(milliseconds(30000));
  if (job.err().find("unshare:") != std::string::npos) GTEST_SKIP() << job.err();
  EXPECT_EQ(code, 3);
  EXPECT_LT(Clock::now() - begin, milliseconds(20000)) << "must fail long before the join timeout of one minute";
  EXPECT_THAT(job.err(), ContainsRegex("zeroth: error: rank [01] cannot reach the job's store at 127.0.0.1: Network is "
                                       "unreachable; the loopback interface is down: enable it with `ip link set lo "
                                       "up`"));
}
}  // namespace
