// Conditions that break a job, and the rank that the failure report names.
#include "control/members.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"

namespace zr::host::control {
namespace {
using std::chrono::milliseconds;
using ::testing::HasSubstr;

// Two ranks of another machine that have joined.
class MembersTest : public ::testing::Test {
 protected:
  MembersTest() {
    for (int rank : {0, 1})
      EXPECT_EQ(members.admit({"job", "token", rank, 2, {100 + rank, "far", "far", "far"}}, now), "");
  }
  void heartbeat(int rank, uint64_t sequence, bool waiting, uint64_t leaves = 0, uint64_t left_sequence = 0,
                 bool left = false) {
    protocol::Heartbeat heartbeat;
    heartbeat.activity = {sequence, 1, "all_reduce 'x'", waiting, 3};
    heartbeat.leaves = leaves;
    heartbeat.left_sequence = left_sequence;
    heartbeat.left_step = 5;
    heartbeat.left = left;
    members.on_heartbeat(rank, heartbeat, now);
  }
  Members::Time now = std::chrono::steady_clock::now();
  Members members{2, false, "here"};
};

TEST_F(MembersTest, LastCollectiveMayFinishAfterOneRankLeft) {
  heartbeat(1, 8, false, 1, 8, true);
  heartbeat(0, 8, true);
  EXPECT_FALSE(members.broken());
  heartbeat(0, 9, true);
  EXPECT_EQ(members.failure_notice(),
            "rank 1 ended after step 5 (ran out of data?) while rank 0 waits in all_reduce 'x'");
}

TEST_F(MembersTest, RankBetweenTwoEnginesIsNotReported) {
  heartbeat(0, 8, false, 1, 8, true);
  heartbeat(1, 8, false, 1, 8, true);
  heartbeat(0, 1, true, 1, 8, false);  // rank 0 is already in its next Engine
  EXPECT_FALSE(members.broken());
  members.disconnected(1);  // the process of rank 1 ends instead of starting another Engine
  EXPECT_THAT(members.failure_notice(), HasSubstr("rank 1 ended after step 5"));
}

TEST_F(MembersTest, DifferentCollectivesBreakJobEvenIfOneRankIsAhead) {
  protocol::Heartbeat ahead, behind;
  for (uint64_t i = 1; i <= 40; ++i) ahead.recent.push_back({i, i == 17 ? 99 : i, "call " + std::to_string(i)});
  members.on_heartbeat(0, ahead, now);
  for (uint64_t i = 1; i <= 17; ++i) behind.recent.push_back({i, i, "other call " + std::to_string(i)});
  members.on_heartbeat(1, behind, now);
  EXPECT_EQ(members.failure_notice(),
            "collective 17 differs between ranks: rank 0 issued call 17, rank 1 issued other call 17. All ranks must "
            "issue the same collectives in the same order");
}

TEST_F(MembersTest, SendsAndCallsOfOtherEnginesAreNotCompared) {
  protocol::Heartbeat one, other;
  one.recent = {{1, 0, "send"}, {2, 7, "call"}};
  other.recent = {{1, 5, "call"}};
  members.on_heartbeat(0, one, now);
  members.on_heartbeat(1, other, now);
  other.leaves = 1;
  other.recent = {{2, 8, "call of the next Engine"}};
  members.on_heartbeat(1, other, now);
  EXPECT_FALSE(members.broken());
}

TEST_F(MembersTest, LostRankTakesPrecedenceOverReportedError) {
  members.reported(0, "all_reduce 'x': the peer is gone");
  EXPECT_EQ(members.failure_notice(), "rank 0: all_reduce 'x': the peer is gone");
  EXPECT_FALSE(members.report_is_ready(now, now));
  members.disconnected(1);
  members.on_final_status(0, {}, now);
  EXPECT_TRUE(members.report_is_ready(now, now));
  EXPECT_EQ(members.failure_notice(), "rank 1 (pid 101) is lost: its connection closed");
}

TEST_F(MembersTest, ReportDoesNotWaitForARankThatIsSilentForTwoSeconds) {
  now += milliseconds(1500);
  heartbeat(0, 8, true);
  members.reported(0, "waited too long");
  members.on_final_status(0, {}, now);
  EXPECT_FALSE(members.report_is_ready(now, now + milliseconds(400)));
  EXPECT_TRUE(members.report_is_ready(now, now + milliseconds(500)));
  EXPECT_EQ(members.headline(now + milliseconds(500)),
            "rank 0: waited too long; rank 1 (pid 101) has not answered for 2.0s");
}

// mpirun ends the ranks that it can reach once it has lost its connection to a host.
TEST_F(MembersTest, NamesRanksThatWereSilentBeforeARankWasLost) {
  now += milliseconds(5000);
  members.disconnected(0);
  EXPECT_EQ(members.headline(now),
            "rank 0 (pid 100) is lost: its connection closed; rank 1 (pid 101) has not answered for 5.0s");
}

TEST_F(MembersTest, AdmitReturnsReasonForRejection) {
  EXPECT_EQ(members.admit({"job", "token", 1, 2, {5, "far", "far", "far"}}, now),
            "rank 1 (pid 101) has joined already, but pid 5 on far has the same rank: give each process its own rank");
  EXPECT_EQ(members.admit({"job", "token", -1, 2, {}}, now), "rank -1 is out of range (world size 2)");
}

// Rank 1's process ends, and rank 0 waits.
class EndedRankTest : public MembersTest {
 protected:
  void end_rank_1(bool by_exit) {
    protocol::Heartbeat last;
    last.leaves = 1;
    last.left = true;
    last.exited = by_exit;
    last.left_sequence = 8;
    last.left_step = 5;
    members.on_heartbeat(1, last, now);
    members.disconnected(1);
  }
  // The heartbeat that rank 0 sends at `now` + `after`: it has waited since `now`, and for `before` before that.
  void rank_0_waits(const std::string& what, uint64_t sequence, milliseconds after,
                    milliseconds before = milliseconds(0)) {
    protocol::Heartbeat heartbeat;
    heartbeat.activity = {sequence, 1, what, true, 3};
    heartbeat.awaits_key = what.starts_with("get");
    heartbeat.age_ms = (before + after).count();
    members.on_heartbeat(0, heartbeat, now + after);
  }
  // The failure notice when rank 0 has waited for `limit`; 1 ms earlier, the job must not have failed.
  std::string notice_after(const std::string& what, milliseconds limit) {
    members.detect_endless_waits(now);
    rank_0_waits(what, 8, limit - milliseconds(100));
    members.detect_endless_waits(now + limit - milliseconds(1));
    EXPECT_FALSE(members.broken());
    members.detect_endless_waits(now + limit);
    return members.failure_notice();
  }
};

TEST_F(EndedRankTest, KeyIsAwaitedForTwoSeconds) {
  end_rank_1(false);
  EXPECT_EQ(notice_after("get of key 'a'", milliseconds(2000)),
            "rank 1 ended after step 5 (ran out of data?) while rank 0 waits in get of key 'a'");
}

TEST_F(EndedRankTest, CollectiveIsAwaitedForFiveSecondsIfTheProcessExited) {
  end_rank_1(true);
  EXPECT_EQ(notice_after("all_reduce 'x'", milliseconds(5000)),
            "rank 1 exited after step 5 (at the end of main, or by exit) while rank 0 waits in all_reduce 'x'");
}

// For example, rank 1 saves its part of a checkpoint for long, and ends before rank 0 has noticed.
TEST_F(EndedRankTest, WaitBeforeTheEndOfTheProcessDoesNotCount) {
  rank_0_waits("get of key 'a'", 8, milliseconds(0), milliseconds(60'000));
  end_rank_1(true);
  members.detect_endless_waits(now);
  members.detect_endless_waits(now + milliseconds(900));
  EXPECT_FALSE(members.broken());
}

TEST_F(EndedRankTest, LastCollectiveMayTakeLongAfterARankLeftNormally) {
  end_rank_1(false);
  members.detect_endless_waits(now);
  rank_0_waits("all_reduce 'x'", 8, milliseconds(59'000));
  members.detect_endless_waits(now + milliseconds(60'000));
  EXPECT_FALSE(members.broken());
}

TEST_F(EndedRankTest, RankThatComputesOrIsSilentMayHelpTheOthers) {
  end_rank_1(true);
  members.detect_endless_waits(now);
  heartbeat(0, 8, false);
  members.detect_endless_waits(now + milliseconds(900));
  EXPECT_FALSE(members.broken()) << "computes";
  rank_0_waits("get of key 'a'", 8, milliseconds(60'000));
  members.detect_endless_waits(now + milliseconds(62'000));
  EXPECT_FALSE(members.broken()) << "no heartbeat for 2 s";
}

// A job of two ranks on one machine, which have joined.
struct Job {
  Job() {
    for (int rank = 0; rank < 2; ++rank) {
      members.started(rank, pid(rank));
      protocol::JoinRequest request;
      request.rank = rank;
      request.world = 2;
      request.peer = {pid(rank), "host", "machine", "node"};
      EXPECT_EQ(members.admit(request, now), "");
    }
  }
  static int64_t pid(int rank) { return 1000000000 + rank; }  // above every real pid
  // The rank leaves the job by an exception, and its process ends.
  void end(int rank, const ExitStatus& exit_status) {
    protocol::Heartbeat heartbeat;
    heartbeat.leaves = 1;
    heartbeat.left = heartbeat.failed = true;
    heartbeat.left_step = 4;
    members.on_heartbeat(rank, heartbeat, now);
    members.disconnected(rank);
    members.ended(rank, pid(rank), exit_status);
  }
  const Members::Time now{};
  Members members{2, true, "machine"};
};

TEST(LocalMembersTest, NamesTheRankThatFailedAndNotTheOneThatEndedBecauseOfIt) {
  for (const bool origin_first : {true, false}) {
    Job job;
    if (origin_first) job.end(0, {1, 0, ""});
    job.end(1, {exit_code::peer_lost, 0, ""});
    EXPECT_TRUE(job.members.broken());
    EXPECT_EQ(job.members.report_is_ready(job.now, job.now), origin_first) << "the report waits for the origin";
    if (!origin_first) job.end(0, {1, 0, ""});
    EXPECT_TRUE(job.members.report_is_ready(job.now, job.now));
    EXPECT_EQ(job.members.headline(job.now), "rank 0 (pid 1000000000) ended with exit code 1 after step 4");
  }
}

// zr::ExitRequest in a function that the engine calls.
TEST(LocalMembersTest, NamesTheRankThatLeftByAnExceptionWithExitCode0) {
  for (const bool origin_first : {true, false}) {
    Job job;
    if (origin_first) job.end(0, {0, 0, ""});
    EXPECT_FALSE(job.members.broken());
    job.end(1, {exit_code::peer_lost, 0, ""});
    if (!origin_first) job.end(0, {0, 0, ""});
    EXPECT_TRUE(job.members.report_is_ready(job.now, job.now));
    EXPECT_EQ(job.members.headline(job.now), "rank 0 (pid 1000000000) ended with exit code 0 after step 4");
  }
}

TEST(LocalMembersTest, NamesARankThatEndedBecauseOfAnotherIfNoOtherFails) {
  Job job;
  job.end(1, {exit_code::peer_lost, 0, ""});
  EXPECT_EQ(job.members.headline(job.now), "rank 1 (pid 1000000001) ended with exit code 4 after step 4");
}

TEST(LocalMembersTest, NamesAKilledRankThatEndedAfterARankThatFollowed) {
  Job job;
  job.end(1, {exit_code::peer_lost, 0, ""});
  job.members.disconnected(0);
  job.members.ended(0, Job::pid(0), {0, 9, ""});
  EXPECT_EQ(job.members.headline(job.now), "rank 0 (pid 1000000000) was killed by signal 9 (SIGKILL)");
}

}  // namespace
}  // namespace zr::host::control
