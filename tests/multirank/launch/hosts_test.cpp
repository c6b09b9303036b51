// `zeroth launch --hosts`: ranks that mpirun starts, on this machine. train_hosts_test.cpp has two hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "support/launch_job.hpp"

using namespace zr::test;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

namespace {
const Environment kAsRoot{{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}};

std::vector<std::string> on_hosts(const std::string& hosts, std::vector<std::string> options) {
  options.insert(options.begin(), {zeroth(), "launch", "--hosts", hosts, "--", rank_program()});
  return options;
}

bool all_trained(Page& page, int ranks, int64_t steps) {
  for (int rank = 0; rank < ranks; ++rank)
    if (page.ranks[size_t(rank)].step < steps) return false;
  return true;
}

bool all_gone(Page& page, int ranks) {
  for (int rank = 0; rank < ranks; ++rank)
    if (!gone(page.ranks[size_t(rank)].pid)) return false;
  return true;
}

pid_t parent_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text, '\0');
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  char state = 0;
  pid_t parent = 0;
  fields >> state >> parent;
  return parent;
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

TEST(ZerothLaunchHosts, PrintsLikeALaunchOnThisMachine) {
  Scene scene;
  Job job(scene, on_hosts("localhost:3", {"steps=5"}), kAsRoot);
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(sorted_lines(job.out()),
              ElementsAre("[1] rank 1 of 3, local 1 of 3, done", "[2] rank 2 of 3, local 2 of 3, done",
                          "rank 0 of 3, local 0 of 3, done"));
  EXPECT_EQ(job.err(), "");
  EXPECT_THAT(scene.page().ranks[1].store.data(), HasSubstr("127.0.0.1:"));
}

TEST(ZerothLaunchHosts, ReportsAKilledRankAndLeavesNone) {
  Scene scene;
  Job job(scene, on_hosts("localhost:3", {}), kAsRoot);
  ASSERT_TRUE(eventually([&] { return all_trained(scene.page(), 3, 3); })) << job.err();
  const pid_t killed = scene.page().ranks[1].pid;
  kill(killed, SIGKILL);
  EXPECT_EQ(job.wait(), 4) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("zeroth: error: rank 1 (pid " + std::to_string(killed) + ") is lost"));
  EXPECT_TRUE(eventually([&] { return all_gone(scene.page(), 3); }));
}

TEST(ZerothLaunchHosts, ReturnsTheExitCodeOfARankThatFails) {
  Scene scene;
  Job job(scene, on_hosts("localhost:2", {"fail_rank=1", "fail_step=4", "fail_code=2"}), kAsRoot);
  EXPECT_EQ(job.wait(), 2) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("the data of this rank is invalid"));
}

TEST(ZerothLaunchHosts, EndsWithZeroAfterRanksThatSaveOnASignal) {
  Scene scene;
  Job job(scene, on_hosts("localhost:2", {"save_on_signal=1"}), kAsRoot);
  ASSERT_TRUE(eventually([&] { return all_trained(scene.page(), 2, 3); })) << job.err();
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("rank 0 of 2"));
}

TEST(ZerothLaunchHosts, EndsRanksThatDoNotSaveOnASignal) {
  Scene scene;
  Job job(scene, on_hosts("localhost:2", {"busy_rank=0", "busy_step=4"}), kAsRoot);
  ASSERT_TRUE(eventually([&] { return all_trained(scene.page(), 1, 4); })) << job.err();
  kill(job.pid(), SIGINT);
  EXPECT_EQ(job.wait(), 128 + SIGINT) << job.err();
  EXPECT_TRUE(eventually([&] { return all_gone(scene.page(), 2); }));
}

TEST(ZerothLaunchHosts, RanksEndWithTheLauncher) {
  Scene scene;
  Job job(scene, on_hosts("localhost:2", {}), kAsRoot);
  ASSERT_TRUE(eventually([&] { return all_trained(scene.page(), 2, 3); })) << job.err();
  kill(job.pid(), SIGKILL);
  EXPECT_TRUE(eventually([&] { return all_gone(scene.page(), 2); }));
}

// Rank 1 does not join, so that it does not see that the store has closed.
TEST(ZerothLaunchHosts, EndsRanksThatHaveNotJoinedIfMpirunIsKilled) {
  Scene scene;
  Job job(scene, on_hosts("localhost:2", {"late_rank=1", "late_ms=60000"}), kAsRoot);
  Page& page = scene.page();
  ASSERT_TRUE(eventually([&] {
    return page.ranks[0].phase == Phase::joining && page.ranks[1].phase == Phase::before_join;
  })) << job.err();
  kill(parent_of(page.ranks[1].pid), SIGKILL);
  EXPECT_EQ(job.wait(), 4) << job.err();
  EXPECT_TRUE(gone(page.ranks[0].pid) && gone(page.ranks[1].pid));
  EXPECT_THAT(job.err(), HasSubstr("zeroth: error: mpirun was killed by signal 9 (Killed), so its ranks were ended"));
}

TEST(ZerothLaunchHosts, PrintsTextThatLooksLikeATagOfMpirun) {
  Scene scene;
  Job job(scene,
          {zeroth(), "launch", "--hosts", "localhost:2", "--", "/bin/sh", "-c",
           "[ $OMPI_COMM_WORLD_RANK = 1 ] || printf 'x [1,1]<stdout>:y\\n[1,1]<stdout>:z\\n'"},
          kAsRoot);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "x [1,1]<stdout>:y\n[1,1]<stdout>:z\n");
}

TEST(ZerothLaunchHosts, OtherUsersCannotReadTheSecret) {
  Scene scene;
  Job job(scene, on_hosts("localhost:2", {}), kAsRoot);
  ASSERT_TRUE(eventually([&] { return all_trained(scene.page(), 2, 3); })) << job.err();
  const std::string secret = variable_of(scene.page().ranks[1].pid, "ZR_TOKEN");
  ASSERT_EQ(secret.size(), 32u);
  std::error_code error;
  for (const auto& process : std::filesystem::directory_iterator("/proc", error)) {
    std::ifstream command(process.path() / "cmdline");
    std::string words;
    std::getline(command, words, '\1');
    EXPECT_THAT(words, Not(HasSubstr(secret))) << process.path();
  }
  kill(job.pid(), SIGTERM);
  job.wait();
}

TEST(ZerothLaunchHosts, NamesAHostThatCannotBeReached) {
  Scene scene;
  auto environment = kAsRoot;
  environment.push_back({"OMPI_MCA_plm_rsh_agent", "false"});  // instead of ssh
  environment.push_back({"ZR_STORE", "127.0.0.1:" + std::to_string(20000 + getpid() % 10000)});
  Job job(scene, on_hosts("nosuchhost.invalid:2", {}), environment);
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(job.err(),
              ContainsRegex("zeroth: error: mpirun ended with exit code [0-9]+ before a rank joined the job: "
                            "see its message above. Every host must be reachable"));
}
}  // namespace
