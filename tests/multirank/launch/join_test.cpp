// Ranks join one job under every launcher's environment variables, and the store rejects other processes.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <functional>
#include <random>

#include "control/protocol.hpp"
#include "support/launch_job.hpp"

using namespace zr::test;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

namespace {
constexpr auto kSoon = milliseconds(5000);

int some_port() {
  static std::mt19937 random{std::random_device{}()};
  return 15000 + int(random() % 4000);
}

Environment torchrun(int rank, int world, int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(world)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"LOCAL_WORLD_SIZE", std::to_string(world)},
          {"MASTER_PORT", std::to_string(port)},
          {"TORCHELASTIC_RUN_ID", "none"}};
}

std::vector<std::string> with_rank_program(std::vector<std::string> options) {
  options.insert(options.begin(), rank_program());
  return options;
}

using Jobs = std::vector<std::unique_ptr<Job>>;

Jobs under_torchrun(Scene& scene, int world, const std::vector<std::string>& options) {
  Jobs jobs;
  const int port = some_port();
  for (int rank = 0; rank < world; ++rank)
    jobs.push_back(std::make_unique<Job>(scene, with_rank_program(options), torchrun(rank, world, port)));
  return jobs;
}

bool all_run(Page& page, int ranks) {
  for (int rank = 0; rank < ranks; ++rank)
    if (page.ranks[size_t(rank)].phase < Phase::computing) return false;
  return true;
}

TEST(Torchrun, RanksTrainAndExit) {
  Scene scene;
  const auto jobs = under_torchrun(scene, 3, {"steps=5"});
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(jobs[size_t(rank)]->wait(), 0) << jobs[size_t(rank)]->err();
    EXPECT_EQ(jobs[size_t(rank)]->out(),
              "rank " + std::to_string(rank) + " of 3, local " + std::to_string(rank) + " of 3, done\n");
  }
}

TEST(Torchrun, SurvivorsNameKilledRank) {
  for (const int victim : {0, 2}) {
    Scene scene;
    const auto jobs = under_torchrun(scene, 3, {});
    ASSERT_TRUE(eventually([&] { return all_run(scene.page(), 3); }));
    std::this_thread::sleep_for(milliseconds(300));
    const std::string pid = std::to_string(jobs[size_t(victim)]->pid());
    kill(jobs[size_t(victim)]->pid(), SIGKILL);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_EQ(jobs[size_t(rank)]->wait(kSoon), 4);
      EXPECT_THAT(
          jobs[size_t(rank)]->err(),
          HasSubstr(victim == 0 ? "rank 0 (pid " + pid + "), which runs the job's store, is lost: its connection closed"
                                : "rank 2 (pid " + pid + ") is lost: its connection closed"));
      EXPECT_THAT(jobs[size_t(rank)]->err(),
                  ContainsRegex("rank " + std::to_string(rank) + "  pid [0-9]+ +(waits|computing)"));
    }
  }
}

// The library does not end the process: the program gets the failure from its next call.
TEST(Torchrun, ProgramReactsToAKilledRankAfterALongComputation) {
  Scene scene;
  const auto jobs = under_torchrun(scene, 2, {"reacts=1", "busy_rank=1", "busy_step=4"});
  ASSERT_TRUE(eventually([&] { return scene.page().ranks[1].step == 4 && all_run(scene.page(), 2); }));
  kill(jobs[0]->pid(), SIGKILL);
  std::this_thread::sleep_for(milliseconds(3000));  // more than the 2 s after which zr::guarded ends a process
  scene.page().stop_computing = true;
  EXPECT_EQ(jobs[1]->wait(), 4) << jobs[1]->err();
  EXPECT_EQ(jobs[1]->out(), "the program reacts to the loss of a peer\n");
  EXPECT_THAT(jobs[1]->err(), Not(HasSubstr("exits because the job has failed")));
}

TEST(Torchrun, KilledRankIsDetectedWhileChildHoldsItsConnection) {
  for (const int victim : {0, 1}) {
    Scene scene;
    const auto jobs = under_torchrun(scene, 2, {"fork_rank=" + std::to_string(victim), "fork_step=5", "fork_ms=4000"});
    ASSERT_TRUE(eventually([&] { return all_run(scene.page(), 2) && scene.page().ranks[size_t(victim)].step > 8; }));
    kill(jobs[size_t(victim)]->pid(), SIGKILL);
    EXPECT_EQ(jobs[size_t(1 - victim)]->wait(milliseconds(3500)), 4);
    EXPECT_THAT(jobs[size_t(1 - victim)]->err(), HasSubstr("is lost: its connection closed"));
  }
}

TEST(Torchrun, SurvivorNamesStoppedStoreHost) {
  Scene scene;
  const auto jobs = under_torchrun(scene, 2, {"timeout_ms=600"});
  ASSERT_TRUE(eventually([&] { return all_run(scene.page(), 2); }));
  std::this_thread::sleep_for(milliseconds(100));
  kill(jobs[0]->pid(), SIGSTOP);
  EXPECT_EQ(jobs[1]->wait(milliseconds(600) + kSoon), 4);
  EXPECT_THAT(jobs[1]->err(),
              ContainsRegex(
                  "rank 1: all_reduce 'gradient bucket [01]' .fp32, 4096. has not completed within 600ms; rank 0 .pid "
                  "[0-9]+., which runs the job's store, has not answered for [0-9.]+s, and its process is "
                  "stopped .T."));
}

TEST(Torchrun, SurvivorNamesStoreHostThatRanOutOfData) {
  Scene scene;
  const auto jobs = under_torchrun(scene, 2, {"short_rank=0", "short_steps=5"});
  EXPECT_EQ(jobs[0]->wait(), 0);
  EXPECT_EQ(jobs[1]->wait(kSoon), 4);
  EXPECT_THAT(jobs[1]->err(),
              HasSubstr("zeroth: error: rank 0 ended after step 5 (ran out of data?) while rank 1 waits in all_reduce "
                        "'gradient bucket 0' (fp32, 4096)"));
}

TEST(Torchrun, StoreSkipsPortInUse) {
  Scene scene;
  const int port = some_port();
  const int taken = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port + 1));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(taken, 8), 0);  // accepts connections and never answers
  Jobs jobs;
  for (int rank = 0; rank < 2; ++rank)
    jobs.push_back(std::make_unique<Job>(scene, with_rank_program({"steps=2"}), torchrun(rank, 2, port)));
  for (const auto& job : jobs) EXPECT_EQ(job->wait(), 0) << job->err();
  close(taken);
}

TEST(Mpirun, RanksTrainAndKilledRankEndsJob) {
  const Environment root{{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}};
  const std::vector<std::string> mpirun{"mpirun.openmpi", "--oversubscribe", "-n", "3", rank_program()};
  {
    Scene scene;
    auto command = mpirun;
    command.push_back("steps=5");
    Job job(scene, command, root);
    ASSERT_EQ(job.wait(), 0) << job.err();
    EXPECT_THAT(job.out(), HasSubstr("rank 2 of 3, local 2 of 3, done\n"));
  }
  Scene scene;
  Job job(scene, mpirun, root);
  ASSERT_TRUE(eventually([&] { return all_run(scene.page(), 3); })) << job.err();
  kill(scene.page().ranks[1].pid, SIGKILL);
  EXPECT_GT(job.wait(kSoon), 0);
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_TRUE(eventually([&] { return gone(scene.page().ranks[size_t(rank)].pid); }));
}

TEST(Srun, RanksDeriveLocalRanksFromHosts) {
  Scene scene;
  const std::string id = std::to_string(some_port());
  Jobs jobs;
  for (int rank = 0; rank < 3; ++rank)
    jobs.push_back(std::make_unique<Job>(scene, with_rank_program({"steps=3"}),
                                         Environment{{"SLURM_PROCID", std::to_string(rank)},
                                                     {"SLURM_STEP_NUM_TASKS", "3"},
                                                     {"SLURM_STEP_NUM_NODES", "1"},
                                                     {"SLURM_JOB_ID", id},
                                                     {"SLURM_STEP_ID", "0"}}));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(jobs[size_t(rank)]->wait(), 0) << jobs[size_t(rank)]->err();
    EXPECT_THAT(jobs[size_t(rank)]->out(), HasSubstr("local " + std::to_string(rank) + " of 3"));
  }
}

TEST(Mpiexec, RanksOfSameParentJoin) {
  Scene scene;
  Jobs jobs;
  for (int rank = 0; rank < 2; ++rank)
    jobs.push_back(std::make_unique<Job>(scene, with_rank_program({"steps=3"}),
                                         Environment{{"PMI_RANK", std::to_string(rank)},
                                                     {"PMI_SIZE", "2"},
                                                     {"MPI_LOCALRANKID", std::to_string(rank)},
                                                     {"MPI_LOCALNRANKS", "2"}}));
  for (const auto& job : jobs) EXPECT_EQ(job->wait(), 0) << job->err();
}

TEST(NoLauncher, StartsSingleRankJob) {
  Scene scene;
  Job job(scene, with_rank_program({"steps=3"}));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "rank 0 of 1, local 0 of 1, done\n");
  EXPECT_LT(scene.page().ranks[0].join_us, 20000);
}

TEST(ControlJoinTest, NamesMissingRanks) {
  Scene scene;
  Job job(scene, with_rank_program({"join_timeout_ms=400"}), torchrun(0, 3, some_port()));
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(
      job.err(),
      ContainsRegex(
          "^zeroth: error: the job has failed; its ranks:\n  rank 0  pid [0-9]+ +waits 0.[4-9]s in join, step 0\n"
          "  rank 1  pid - +has not joined the job\n  rank 2  pid - +has not joined the job\n"
          "zeroth: error: rank 0: not all ranks have joined within 0.4s; rank 1 has not joined; rank 2 has not "
          "joined\n$"));
}

TEST(ControlJoinTest, ReportsAddressWithoutStore) {
  Scene scene;
  Job job(scene, with_rank_program({"join_timeout_ms=300"}),
          Environment{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "14999"}});
  EXPECT_EQ(job.wait(), 3);
  EXPECT_THAT(job.err(), testing::MatchesRegex(
                             "zeroth: error: rank 1 cannot find the store of its job at 127.0.0.1 port 15000: rank 0 "
                             "has not written the job's secret to .*/job-[0-9a-f]+. Check that rank 0, which runs the "
                             "store, is running, and that this is its address; to use another address, set "
                             "ZR_STORE=host:port to the same value on every rank\n"));
}

TEST(ControlJoinTest, RejectsSecondProcessOfOneRank) {
  Scene scene;
  const int port = some_port();
  Job store_host(scene, with_rank_program({"steps=1"}), torchrun(0, 3, port));
  Job first(scene, with_rank_program({"steps=1"}), torchrun(1, 3, port));
  std::this_thread::sleep_for(milliseconds(300));
  Job second(scene, with_rank_program({"steps=1"}), torchrun(1, 3, port));
  EXPECT_EQ(second.wait(), 3);
  EXPECT_THAT(second.err(), HasSubstr("zeroth: error: rank 1 (pid " + std::to_string(first.pid()) +
                                      ") has joined already, but pid " + std::to_string(second.pid()) + " on "));
  Job third(scene, with_rank_program({"steps=1"}), torchrun(2, 3, port));
  EXPECT_EQ(third.wait(), 0);
  EXPECT_EQ(store_host.wait(), 0);
}

TEST(ControlJoinTest, RejectsRankWithDifferentWorldSize) {
  Scene scene;
  const int port = some_port();
  Job store_host(scene, with_rank_program({}), torchrun(0, 3, port));
  Job other(scene, with_rank_program({}), torchrun(1, 2, port));
  EXPECT_EQ(other.wait(), 3);
  EXPECT_EQ(other.err(),
            "zeroth: error: rank 1 expects 2 ranks, but the job has 3: start all ranks with one launcher command\n");
}

TEST(ControlJoinTest, JoinOfSixteenRanksTakesMilliseconds) {
  Scene scene;
  const auto begin = Clock::now();
  Job job(scene, launched(16, {"steps=2"}));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_LT(Clock::now() - begin, milliseconds(3000));
  int64_t least = INT64_MAX, most = 0;
  for (int rank = 0; rank < 16; ++rank) {
    least = std::min<int64_t>(least, scene.page().ranks[size_t(rank)].join_us);
    most = std::max<int64_t>(most, scene.page().ranks[size_t(rank)].join_us);
  }
  EXPECT_LT(least, 200000);  // the last rank to join does not wait for others
  RecordProperty("least_us", int(least));
  std::printf("join of 16 ranks: %.1f ms for the last rank, %.1f ms for the first\n", double(least) / 1e3,
              double(most) / 1e3);
}

// Milliseconds of the fastest of five calls.
double fastest(const std::function<void()>& call) {
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto begin = Clock::now();
    call();
    best = std::min(best, std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  }
  return best;
}

// A fixed wait in join or exit would make the job much slower than the start of its three processes.
TEST(ControlJoinTest, JoinAndExitOfTwoRanksTakeNoLongerThanAFewProcessStarts) {
  Scene scene;
  const double start = fastest([&] { EXPECT_EQ(Job(scene, {zeroth(), "--version"}).wait(), 0); });
  const double job = fastest([&] { EXPECT_EQ(Job(scene, launched(2, {"steps=1"})).wait(), 0); });
  EXPECT_LT(job, 30 * start) << "ms; one process start: " << start << " ms";
}

// A raw connection to a running job's store.
class RawConnection {
 public:
  explicit RawConnection(const std::string& store) {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(std::stoi(store.substr(store.rfind(':') + 1))));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  ~RawConnection() { close(fd_); }
  void say(const std::string& bytes) { EXPECT_GT(send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL), 0); }
  // Reads everything until the store closes the connection.
  std::string answer() {
    std::string all;
    char buffer[4096];
    for (ssize_t n; (n = recv(fd_, buffer, sizeof buffer, 0)) > 0;) all.append(buffer, size_t(n));
    return all;
  }

 private:
  int fd_;
};

TEST(StoreTest, SurvivesUnauthenticatedConnectionsAndGarbage) {
  using namespace zr::host;
  Scene scene;
  auto& page = scene.page();
  Job job(scene, launched(2, {"steps=150", "compute_ms=5"}));
  ASSERT_TRUE(eventually([&] { return all_run(page, 2); }));
  const std::string store = page.ranks[0].store.data();
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    std::string bytes(1 + random() % 3000, '\0');
    for (char& c : bytes) c = char(random());
    RawConnection(store).say(bytes);
  }
  {
    RawConnection raw(store);  // a message length of 4 GiB
    raw.say(std::string("\xff\xff\xff\xff\x01", 5));
    EXPECT_EQ(raw.answer(), "");
  }
  {
    RawConnection raw(store);  // a heartbeat before the hello
    raw.say(control::protocol::encode(control::protocol::Type::heartbeat, control::protocol::Heartbeat{}));
    EXPECT_EQ(raw.answer(), "");
  }
  {
    RawConnection raw(store);  // a truncated hello whose inner lengths exceed it
    std::string hello = control::protocol::encode(control::protocol::JoinRequest{"job", "token", 0, 2, {}});
    hello[control::protocol::kHeaderBytes] = 127;
    raw.say(hello);
    EXPECT_EQ(raw.answer(), "");
  }
  {
    RawConnection raw(store);
    raw.say(control::protocol::encode(control::protocol::JoinRequest{
        "zr-000000000000", "00000000000000000000000000000000", 1, 2, control::protocol::this_peer()}));
    const std::string answer = raw.answer();
    EXPECT_THAT(answer, HasSubstr("this store belongs to another job"));
  }
  RawConnection silent(store);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.err(), "");
}

struct Wrong {
  const char* name;
  Environment environment;
  const char* text;
};
class LauncherVariablesTest : public testing::TestWithParam<Wrong> {};

TEST_P(LauncherVariablesTest, ErrorsNameVariableAndRemedy) {
  Scene scene;
  Job job(scene, with_rank_program({}), GetParam().environment);
  EXPECT_EQ(job.wait(), 3);
  EXPECT_EQ(job.err(), std::string("zeroth: error: ") + GetParam().text + "\n");
}

INSTANTIATE_TEST_SUITE_P(Invalid, LauncherVariablesTest,
                         testing::Values(Wrong{"ZerothWithoutWorld",
                                               {{"ZR_RANK", "0"}},
                                               "ZR_WORLD is not set, but zeroth launch's other variables are: start "
                                               "the program with `zeroth launch -n N -- PROGRAM`, or unset "
                                               "ZR_RANK"},
                                         Wrong{"TorchrunWithoutAddress",
                                               {{"RANK", "0"}, {"WORLD_SIZE", "2"}},
                                               "MASTER_ADDR is not set, but torchrun's other variables are: start the "
                                               "program with torchrun or `zeroth launch`, or unset RANK "
                                               "and WORLD_SIZE"},
                                         Wrong{"TorchrunWithoutRank",
                                               {{"LOCAL_RANK", "0"}, {"WORLD_SIZE", "2"}},
                                               "RANK is not set, but torchrun's other variables are: start the program "
                                               "with torchrun or `zeroth launch`, or unset RANK and WORLD_SIZE"},
                                         Wrong{"TorchrunWithoutWorld",
                                               {{"LOCAL_RANK", "1"}, {"RANK", "1"}},
                                               "WORLD_SIZE is not set, but torchrun's other variables are: start the "
                                               "program with torchrun or `zeroth launch`, or unset RANK "
                                               "and WORLD_SIZE"},
                                         Wrong{"RankBeyondWorld",
                                               {{"RANK", "2"}, {"WORLD_SIZE", "2"}},
                                               "RANK=2 is not a number from 0 to 1: start the program with torchrun or "
                                               "`zeroth launch`, or unset RANK and WORLD_SIZE"},
                                         Wrong{"StoreWithoutPort",
                                               {{"ZR_RANK", "0"}, {"ZR_WORLD", "2"}, {"ZR_STORE", "here"}},
                                               "ZR_STORE=here is not of the form host:port; example: "
                                               "ZR_STORE=node01:29600, or ZR_STORE=[fd00::1]:29600"},
                                         Wrong{"MpirunOverHosts",
                                               {{"OMPI_COMM_WORLD_RANK", "0"},
                                                {"OMPI_COMM_WORLD_SIZE", "4"},
                                                {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                                {"PMIX_NAMESPACE", "7"}},
                                               "mpirun started ranks on several nodes and does not report which node "
                                               "has rank 0: pass its host name and a free port, mpirun -x "
                                               "ZR_STORE=host:port ..."}),
                         [](const auto& info) { return info.param.name; });
}  // namespace
