// Which rank the failure report names first.
#include "control/members.hpp"

#include <gtest/gtest.h>

#include "base/error.hpp"

namespace zr::host::control {
namespace {

// A job of two ranks on one machine, which have joined.
struct Job {
  Job() {
    for (int rank = 0; rank < 2; ++rank) {
      members.started(rank, pid(rank));
      protocol::JoinRequest request;
      request.rank = rank;
      request.world = 2;
      request.peer = {pid(rank), "host", "machine"};
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

TEST(MembersTest, ReportNamesTheRankThatFailedAndNotTheOneThatEndedBecauseOfIt) {
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

TEST(MembersTest, ReportNamesARankThatEndedBecauseOfAnotherIfNoOtherFails) {
  Job job;
  job.end(1, {exit_code::peer_lost, 0, ""});
  EXPECT_EQ(job.members.headline(job.now), "rank 1 (pid 1000000001) ended with exit code 4 after step 4");
}

TEST(MembersTest, ReportNamesAKilledRankThatEndedAfterARankThatFollowed) {
  Job job;
  job.end(1, {exit_code::peer_lost, 0, ""});
  job.members.disconnected(0);
  job.members.ended(0, Job::pid(0), {0, 9, ""});
  EXPECT_EQ(job.members.headline(job.now), "rank 0 (pid 1000000000) was killed by signal 9 (SIGKILL)");
}

}  // namespace
}  // namespace zr::host::control
