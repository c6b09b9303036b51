// A rank dies, stops, leaves early or issues different collectives: the job ends soon and reports the reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <sstream>

#include "support/launch_job.hpp"

using namespace zr::test;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

namespace {
constexpr auto kSoon = milliseconds(5000);

bool all_reached(Page& page, int ranks, Phase phase) {
  for (int rank = 0; rank < ranks; ++rank)
    if (page.ranks[size_t(rank)].phase < phase) return false;
  return true;
}

void expect_nothing_left(Page& page, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = page.ranks[size_t(rank)].pid;
    EXPECT_TRUE(pid == 0 || eventually([&] { return gone(pid); }, milliseconds(200)))
        << "rank " << rank << " pid " << pid;
  }
}

// The line of a rank in the failure report.
std::string line_of(const std::string& text, int rank) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.rfind("  rank " + std::to_string(rank) + "  ", 0) == 0) return line;
  return "no line of rank " + std::to_string(rank) + " in:\n" + text;
}

struct Kill {
  int victim;
  Phase phase;
  const char* name;
};

class ZerothLaunchKilledRank : public testing::TestWithParam<Kill> {};

TEST_P(ZerothLaunchKilledRank, EndsJobWithinFiveSecondsAndReportsEverySurvivor) {
  const auto [victim, phase, name] = GetParam();
  std::mt19937 random(unsigned(victim) * 7 + unsigned(phase));
  constexpr int kRanks = 3;
  for (int repeat = 0; repeat < 3; ++repeat) {
    Scene scene;
    auto& page = scene.page();
    std::vector<std::string> options{"compute_ms=3"};
    if (phase == Phase::joining) options = {"late_rank=" + std::to_string((victim + 1) % kRanks), "late_ms=600000"};
    if (phase == Phase::before_join) options = {"late_rank=" + std::to_string(victim), "late_ms=600000"};
    Job job(scene, launched(kRanks, options));
    const bool runs = phase == Phase::computing || phase == Phase::collective;
    ASSERT_TRUE(eventually([&] { return all_reached(page, kRanks, runs ? Phase::computing : Phase::before_join); }));
    std::this_thread::sleep_for(milliseconds(random() % 400));
    ASSERT_TRUE(eventually([&] { return page.ranks[size_t(victim)].phase == phase; }));
    const pid_t pid = page.ranks[size_t(victim)].pid;
    const auto killed = Clock::now();
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    EXPECT_EQ(job.wait(kSoon), 4) << job.err();
    EXPECT_LT(Clock::now() - killed, kSoon);
    const std::string text = job.err();
    EXPECT_THAT(text, HasSubstr("zeroth: error: rank " + std::to_string(victim) + " (pid " + std::to_string(pid) +
                                ") was killed by signal 9 (SIGKILL)"));
    for (int rank = 0; runs && rank < kRanks; ++rank) {
      const std::string line = line_of(text, rank);
      EXPECT_THAT(line, HasSubstr("pid " + std::to_string(page.ranks[size_t(rank)].pid)));
      EXPECT_THAT(line,
                  ContainsRegex(rank == victim ? "killed by signal 9 .*step [0-9]+"
                                               : "(waits [0-9.]+s in all_reduce 'gradient bucket [01]' .fp32, 4096., "
                                                 "collective|computing for).*step [0-9]+"));
    }
    expect_nothing_left(page, kRanks);
  }
}

INSTANTIATE_TEST_SUITE_P(
    AnyRankAndPhase, ZerothLaunchKilledRank,
    testing::Values(Kill{0, Phase::collective, "Rank0InCollective"}, Kill{1, Phase::collective, "Rank1InCollective"},
                    Kill{2, Phase::collective, "Rank2InCollective"}, Kill{0, Phase::computing, "Rank0Computing"},
                    Kill{1, Phase::computing, "Rank1Computing"}, Kill{2, Phase::computing, "Rank2Computing"},
                    Kill{0, Phase::before_join, "Rank0BeforeJoin"}, Kill{1, Phase::before_join, "Rank1BeforeJoin"},
                    Kill{0, Phase::joining, "Rank0Joining"}, Kill{2, Phase::joining, "Rank2Joining"}),
    [](const auto& info) { return info.param.name; });

TEST(ZerothLaunch, KilledRankEndsSurvivorThatComputesForever) {
  Scene scene;
  auto& page = scene.page();
  Job job(scene, launched(3, {"busy_rank=2", "busy_step=4"}));
  ASSERT_TRUE(eventually([&] { return page.ranks[2].step == 4 && page.ranks[2].phase == Phase::computing; }));
  std::this_thread::sleep_for(milliseconds(300));
  const pid_t pid = page.ranks[1].pid;
  kill(pid, SIGKILL);
  EXPECT_EQ(job.wait(kSoon), 4);
  EXPECT_THAT(job.err(), HasSubstr("rank 1 (pid " + std::to_string(pid) + ") was killed by signal 9 (SIGKILL)"));
  EXPECT_THAT(line_of(job.err(), 2), ContainsRegex("computing for [0-9.]+s, after collective 8, step 4"));
  EXPECT_THAT(line_of(job.err(), 0),
              ContainsRegex("waits [0-9.]+s in all_reduce 'gradient bucket 0' .*collective 9, step 4"));
  EXPECT_THAT(job.err(), HasSubstr("[2] zeroth: error: rank 2 (pid " + std::to_string(page.ranks[2].pid) +
                                   ") exits because the job has failed; last activity: "));
  expect_nothing_left(page, 3);
}

TEST(ZerothLaunch, PrintsFailureTableOnce) {
  Scene scene;
  auto& page = scene.page();
  Job job(scene, launched(4, {}));
  ASSERT_TRUE(eventually([&] { return all_reached(page, 4, Phase::computing); }));
  std::this_thread::sleep_for(milliseconds(300));
  kill(page.ranks[3].pid, SIGKILL);
  EXPECT_EQ(job.wait(kSoon), 4);
  std::istringstream lines(job.err());
  int count = 0;
  std::string last;
  for (std::string line; std::getline(lines, line); ++count) last = line;
  EXPECT_EQ(count, 6) << job.err();
  EXPECT_THAT(last, ContainsRegex("^zeroth: error: rank 3 .pid [0-9]+. was killed by signal 9 .SIGKILL."));
}

TEST(ZerothLaunch, StoppedRankIsReportedAfterTimeoutAndKilled) {
  Scene scene;
  auto& page = scene.page();
  Job job(scene, launched(3, {"timeout_ms=1500"}));
  ASSERT_TRUE(eventually([&] { return all_reached(page, 3, Phase::computing); }));
  std::this_thread::sleep_for(milliseconds(300));
  const pid_t pid = page.ranks[1].pid;
  kill(pid, SIGSTOP);
  EXPECT_EQ(job.wait(milliseconds(1500) + kSoon), 4);
  EXPECT_THAT(
      job.err(),
      ContainsRegex("zeroth: error: rank [02]: all_reduce 'gradient bucket [01]' .fp32, 4096. has not completed within "
                    "1500ms; rank 1 .pid " +
                    std::to_string(pid) + ". has not answered for [0-9.]+s, and its process is stopped .T."));
  EXPECT_THAT(line_of(job.err(), 1), ContainsRegex("no answer for [12][0-9.]+s, stopped .T.; last seen: "));
  EXPECT_THAT(line_of(job.err(), 0), ContainsRegex("waits [12][0-9.]+s in all_reduce 'gradient bucket"));
  expect_nothing_left(page, 3);
}

TEST(ZerothLaunch, HangingRankIsNamed) {
  Scene scene;
  Job job(scene, launched(3, {"busy_rank=2", "busy_step=4", "timeout_ms=700"}));
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), ContainsRegex("has not completed within 700ms; rank 2 has not reached this collective"));
  EXPECT_THAT(line_of(job.err(), 2), ContainsRegex("computing for [01]..s, after collective 8, step 4"));
}

TEST(ZerothLaunch, DifferentCollectivesAreReportedWithBothCalls) {
  Scene scene;
  const auto begin = Clock::now();
  Job job(scene, launched(3, {"odd_rank=1", "odd_step=5"}));
  EXPECT_EQ(job.wait(kSoon), 4);
  EXPECT_LT(Clock::now() - begin, milliseconds(3000));
  EXPECT_THAT(
      job.err(),
      ContainsRegex("zeroth: error: collective 11 differs between ranks: rank [0-9] issued all_[^,]*fp32, 4096.*rank "
                    "[0-9] issued all_[^,]*fp32, 4096.. All ranks must issue the same collectives in the same order"));
  EXPECT_THAT(job.err(), HasSubstr("rank 1 issued all_gather 'weights 0' (fp32, 4096)"));
  expect_nothing_left(scene.page(), 3);
}

TEST(ZerothLaunch, RankThatRanOutOfDataIsNamed) {
  for (const int early : {0, 1}) {
    Scene scene;
    const auto begin = Clock::now();
    Job job(scene, launched(2, {"short_rank=" + std::to_string(early), "short_steps=5"}));
    EXPECT_EQ(job.wait(kSoon), 4);
    EXPECT_LT(Clock::now() - begin, milliseconds(2000));
    EXPECT_THAT(job.err(), HasSubstr("zeroth: error: rank " + std::to_string(early) +
                                     " ended after step 5 (ran out of data?) while rank " + std::to_string(1 - early) +
                                     " waits in all_reduce 'gradient bucket 0' (fp32, 4096)"));
    EXPECT_THAT(line_of(job.err(), early), HasSubstr("ended normally after step 5"));
  }
}

// A rank may end as soon as its part of the last collective is done, while others still wait for theirs.
TEST(ZerothLaunch, RankThatHasIssuedTheLastCollectiveMayEnd) {
  for (const int ahead : {0, 1}) {
    Scene scene;
    Job job(scene, launched(2, {"steps=5", "engines=2", "ahead_rank=" + std::to_string(ahead)}));
    EXPECT_EQ(job.wait(), 0) << job.err();
    EXPECT_EQ(job.err(), "");
  }
}

TEST(ZerothLaunch, ReturnsExitCodeOfFailedRank) {
  Scene scene;
  Job job(scene, launched(3, {"fail_rank=1", "fail_step=5", "fail_code=3"}));
  EXPECT_EQ(job.wait(kSoon), 3);
  EXPECT_THAT(job.err(), HasSubstr("[1] zeroth: error: the data of this rank is invalid\n"));
  EXPECT_THAT(job.err(), ContainsRegex("zeroth: error: rank 1 .pid [0-9]+. ended with exit code 3"));
}

TEST(ZerothLaunch, RankThatExitsWithoutLeavingIsLost) {
  Scene scene;
  Job job(scene, launched(3, {"quit_rank=2", "quit_step=5"}));
  EXPECT_EQ(job.wait(kSoon), 4);
  EXPECT_THAT(job.err(),
              ContainsRegex("zeroth: error: rank 2 .pid [0-9]+. ended with exit code 0 without leaving the job"));
}

TEST(ZerothLaunch, ProgramThatCatchesTheLossOfAPeerMayContinue) {
  Scene scene;
  auto& page = scene.page();
  Job job(scene, launched(2, {"reacts=1", "saves_ms=4000"}));  // longer than other ranks live after the report
  ASSERT_TRUE(eventually([&] { return page.ranks[0].step > 2 && page.ranks[1].step > 2; }));
  kill(page.ranks[1].pid, SIGKILL);
  EXPECT_EQ(job.wait(), 4);
  EXPECT_EQ(job.out(), "the program reacts to the loss of a peer\n");
  EXPECT_THAT(job.err(),
              HasSubstr("zeroth: error: the program may continue after the failure of the job on these ranks: 0; the "
                        "launcher ends them in 10 minutes\n"));
}

TEST(ZerothLaunch, ProgramThatComputesDuringTheLossOfAPeerMayContinue) {
  Scene scene;
  auto& page = scene.page();
  Job job(scene, launched(2, {"reacts=1", "compute_ms=4000"}));  // longer than other ranks live after the report
  ASSERT_TRUE(
      eventually([&] { return page.ranks[0].phase == Phase::computing && page.ranks[1].phase == Phase::computing; }));
  kill(page.ranks[1].pid, SIGKILL);
  EXPECT_EQ(job.wait(), 4);
  EXPECT_EQ(job.out(), "the program reacts to the loss of a peer\n");
}

TEST(ZerothLaunch, RankThatExitsBeforeTheOthersGetItsValueIsNamed) {
  Scene scene;
  Job job(scene, launched(2, {"get_rank=0", "early_rank=1"}));
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(),
              HasSubstr("zeroth: error: rank 1 exited after step 0 (at the end of main, or by exit) while rank 0 waits "
                        "in get of key 'a key that no rank puts'"));
}

TEST(ZerothLaunch, RankMayLeaveThroughExit) {
  Scene scene;
  Job job(scene, launched(3, {"steps=5", "exit_rank=1"}));
  EXPECT_EQ(job.wait(kSoon), 0) << job.err();
  EXPECT_EQ(job.err(), "");
}

TEST(ZerothLaunch, EnginesRunOneAfterAnotherInOneProcess) {
  Scene scene;
  Job job(scene, launched(3, {"steps=5", "engines=20", "compute_ms=0"}));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.err(), "");
}

TEST(ZerothLaunch, ExitOfForkedChildDoesNotEndItsRank) {
  Scene scene;
  Job job(scene, launched(3, {"steps=40", "fork_rank=1", "fork_step=5"}));
  EXPECT_EQ(job.wait(kSoon), 0) << job.err();
  EXPECT_THAT(job.err(), Not(HasSubstr("zeroth")));
}

TEST(ZerothLaunch, ReportShowsRankWaitingForKey) {
  Scene scene;
  auto& page = scene.page();
  Job job(scene, launched(3, {"get_rank=0"}));
  ASSERT_TRUE(eventually([&] { return page.ranks[1].phase == Phase::collective; }));
  std::this_thread::sleep_for(milliseconds(300));
  kill(page.ranks[2].pid, SIGKILL);
  EXPECT_EQ(job.wait(kSoon), 4);
  EXPECT_THAT(line_of(job.err(), 0), ContainsRegex("waits [0-9.]+s in get of key 'a key that no rank puts', step 0"));
}

TEST(ZerothLaunch, GetOfMissingKeyTimesOut) {
  Scene scene;
  Job job(scene, launched(2, {"get_rank=0", "get_ms=300"}));
  EXPECT_EQ(job.wait(kSoon), 4);
  EXPECT_THAT(job.err(),
              HasSubstr("zeroth: error: no rank has put 'a key that no rank puts' into the job's store within 0.3s\n"));
}

// A get may take hours, for example while another rank saves a checkpoint.
TEST(ZerothLaunch, StoppedRankEndsAGet) {
  Scene scene;
  auto& page = scene.page();
  Job job(scene, launched(3, {"get_rank=0", "silence_ms=2000"}));
  ASSERT_TRUE(eventually([&] { return page.ranks[1].phase == Phase::collective; }));
  kill(page.ranks[2].pid, SIGSTOP);
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), ContainsRegex("zeroth: error: rank 0: stopped waiting for key 'a key that no rank puts', "
                                       "because a rank does not answer; .*rank 2 .pid [0-9]+. has not answered for "
                                       "[0-9.]+s, and its process is stopped .T."));
  expect_nothing_left(page, 3);
}

TEST(ZerothLaunch, CtrlCEndsJobWithinTwoSeconds) {
  Scene scene;
  auto& page = scene.page();
  Job job(scene, launched(4, {}));
  ASSERT_TRUE(eventually([&] { return all_reached(page, 4, Phase::computing); }));
  std::this_thread::sleep_for(milliseconds(100));
  kill(page.ranks[2].pid, SIGSTOP);  // the launcher must end a stopped rank too
  kill(job.pid(), SIGINT);
  EXPECT_EQ(job.wait(milliseconds(2000)), 130);
  EXPECT_EQ(job.err(), "");
  expect_nothing_left(page, 4);
}

TEST(ZerothLaunch, KillsRanksThatIgnoreSignalAfterFiveSeconds) {
  Scene scene;
  Job job(scene, launch_of(2, {"sh", "-c", "trap '' TERM; echo ready; while true; do sleep 0.1; done"}));
  ASSERT_TRUE(eventually([&] { return job.out().find("[1] ready\n") != std::string::npos; }));
  const auto begin = Clock::now();
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.wait(milliseconds(7000)), 143);
  EXPECT_GT(Clock::now() - begin, milliseconds(4500));
}

TEST(ZerothLaunch, RanksEndWhenLauncherIsKilled) {
  Scene scene;
  auto& page = scene.page();
  Job job(scene, launched(3, {}));
  ASSERT_TRUE(eventually([&] { return all_reached(page, 3, Phase::computing); }));
  kill(job.pid(), SIGKILL);
  EXPECT_EQ(job.wait(), 137);
  expect_nothing_left(page, 3);
}

TEST(ZerothLaunch, FailedRankEndsRanksThatNeverJoined) {
  Scene scene;
  const auto begin = Clock::now();
  Job job(scene, launch_of(3, {"sh", "-c", "[ $ZR_RANK != 1 ] || exit 7; exec sleep 60"}));
  EXPECT_EQ(job.wait(kSoon), 7);
  EXPECT_LT(Clock::now() - begin, milliseconds(1500));
  EXPECT_THAT(job.err(),
              ContainsRegex("^zeroth: error: rank 1 .pid [0-9]+. ended with exit code 7 before it joined the job\n$"));
}

TEST(ZerothLaunch, LeavesNoGrandchildren) {
  Scene scene;
  Job job(scene, launch_of(2, {"sh", "-c", "sleep 321 & echo child $!; exit 0"}));
  EXPECT_EQ(job.wait(), 0);
  std::istringstream words(job.out());
  int children = 0;
  for (std::string word; words >> word;) {
    if (word != "child") continue;
    pid_t pid = 0;
    words >> pid;
    ++children;
    EXPECT_TRUE(eventually([&] { return gone(pid); }, milliseconds(1000))) << pid;
  }
  EXPECT_EQ(children, 2) << job.out();
}
}  // namespace
