// Jobs in a Slurm cluster of this machine (slurm_cluster.sh), of one node or two: ranks that srun starts, and other
// launchers in an allocation. All tests have the cluster as their fixture.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <sstream>

#include "control/protocol.hpp"
#include "simulators/network_hosts.hpp"
#include "support/launch_job.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"
#include "support/text_of.hpp"
#include "zr/error.hpp"

namespace {

using namespace zr::test;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Ne;
using testing::Not;
using zr::testing::Hosts;
using zr::testing::Outcome;
using zr::testing::shell;
using zr::testing::text_of;
namespace protocol = zr::host::control::protocol;
namespace fs = std::filesystem;

constexpr auto kPatience = std::chrono::seconds(30);
const std::string kScript = ZR_SOURCE_DIR "/tests/simulators/slurm_cluster.sh";
const std::string kTwoNodes = "env ZR_TOKEN=secret srun --nodes=2 --ntasks-per-node=2";
const std::string kPmix = kTwoNodes + " --mpi=pmix", kQuickstart = ZR_BUILD_DIR "/bin/quickstart";

std::string why_no_cluster() {
  if (geteuid() != 0) return "only root can start a Slurm cluster";
  for (const char* program : {"srun", "slurmctld", "slurmd", "munged"})
    if (!zr::testing::has_program(program)) return std::string(program) + " is not installed (.ci/debian-hosts.txt)";
  const Hosts hosts(1);
  return hosts.unavailable().empty() ? "" : "cannot create network namespaces: " + hosts.unavailable();
}

class SrunTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_no_cluster();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  ~SrunTest() override {
    if (hosts_) shell(kScript + " down " + folder_);
  }

  void start(int nodes) {
    const Outcome up = shell(kScript + " up " + folder_ + " " + std::to_string(nodes));
    ASSERT_EQ(up.code, 0) << up.output;
    std::string name = shell(kScript + " name " + folder_).output;
    name.erase(name.find_last_not_of('\n') + 1);
    hosts_ = std::make_unique<Hosts>(name, nodes);
  }
  const Hosts& hosts() const { return *hosts_; }
  // Runs the command on the first node, in the folder of this test; ZR_TOKEN is not set.
  std::vector<std::string> words(const std::string& command) const {
    return {kScript, "run", folder_, "cd " + scratch_.folder().string() + " && unset ZR_TOKEN && " + command};
  }
  Outcome run(const std::string& command) const {
    std::string line;
    for (const std::string& word : words("timeout 60 " + command)) line += "'" + escaped(word) + "' ";
    return shell(line);
  }
  // A rank program in the background.
  std::unique_ptr<Job> start_ranks(const std::string& srun, const std::string& options) {
    return std::make_unique<Job>(*scene_, words("exec " + srun + " " + rank_program() + " " + options));
  }
  bool all_run(int ranks) {
    return eventually(
        [&] {
          for (int rank = 0; rank < ranks; ++rank)
            if (page().ranks[size_t(rank)].step < 3) return false;
          return true;
        },
        kPatience);
  }
  Page& page() { return scene_->page(); }

  // The command line of a training job, and what it has recorded.
  static std::string quickstart(const std::string& name, const std::string& keys = "train.steps=20") {
    return kQuickstart +
           " " ZR_SOURCE_DIR
           "/examples/quickstart/quickstart.toml job.threads=1 job.ranks=4 job.runs=runs communicator=auto "
           "job.name=" +
           name + " " + keys;
  }
  struct Trained {
    std::string weights;
    std::vector<std::string> losses;
    bool operator==(const Trained& other) const { return weights == other.weights && losses == other.losses; }
  };
  Trained trained(const std::string& name) const {
    Trained trained;
    std::ifstream rows(scratch_.path("runs/" + name + "/metrics.jsonl"));
    for (std::string row; std::getline(rows, row);)
      trained.losses.push_back(nlohmann::json::parse(row).at("loss").dump());
    trained.weights = summary(name).value("weights_hash", "");
    return trained;
  }
  int64_t steps_of(const std::string& name) const {
    const std::string rows = text_of(scratch_.path("runs/" + name + "/metrics.jsonl"));
    return std::count(rows.begin(), rows.end(), '\n');
  }
  nlohmann::json summary(const std::string& name) const {
    std::ifstream file(scratch_.path("runs/" + name + "/summary.json"));
    return file ? nlohmann::json::parse(file) : nlohmann::json::object();
  }
  // What `zeroth launch` trains on this machine.
  Trained on_one_host(const std::string& keys = "train.steps=20", size_t steps = 20) const {
    const auto done = shell("cd " + scratch_.folder().string() + " && " ZR_BUILD_DIR "/bin/zeroth launch -n 4 -- " +
                            quickstart("one", keys));
    EXPECT_EQ(done.code, 0) << done.output;
    EXPECT_THAT(trained("one").losses, testing::SizeIs(steps));
    return trained("one");
  }

  void expect_no_ranks(const std::string& program = rank_program()) const {
    for (int node = 0; node < hosts().count(); ++node)
      EXPECT_TRUE(eventually([&] { return hosts().processes(node, program).empty(); })) << node;
    EXPECT_TRUE(eventually([&] { return run("squeue --noheader").output.empty(); })) << run("squeue").output;
  }

  // The processes of ranks on all nodes, by rank, as this machine sees them.
  std::map<int, pid_t> processes_of(const std::string& program = rank_program()) const {
    std::map<int, pid_t> ranks;
    for (int node = 0; node < hosts().count(); ++node)
      for (const pid_t pid : hosts().processes(node, program)) {
        if (const std::string rank = variable_of(pid, "SLURM_PROCID"); !rank.empty()) ranks[std::stoi(rank)] = pid;
      }
    return ranks;
  }
  // Of these ranks: soon after the time limit of a collective, also on a busy machine. The default limit is minutes.
  static void expect_end_of_ranks(const std::map<int, pid_t>& ranks, std::chrono::milliseconds timeout) {
    const auto begin = std::chrono::steady_clock::now();
    for (const auto& [rank, pid] : ranks) EXPECT_TRUE(eventually([pid = pid] { return gone(pid); }, kPatience)) << rank;
    EXPECT_LE(std::chrono::steady_clock::now() - begin, timeout + std::chrono::seconds(30));
  }
  // How messages name a rank.
  static std::string named(int rank, const std::string& pid = "[0-9]+") {
    return "rank " + std::to_string(rank) + " .pid " + pid + "." + (rank == 0 ? ", which runs the job's store," : "");
  }

  // Trains on two nodes until a rank gets the signal: the others end in time, the message names the rank, and the job
  // resumes to the weights of one host. state: what the message says of the rank.
  void expect_resumes_after(int signal, int rank, const std::string& state) {
    ASSERT_NO_FATAL_FAILURE(start(2));
    const std::string always = "communicator=mpi checkpoint.dir=checkpoints ";
    {
      const std::string keys =
          always + "communicator.timeout=3s train.steps=100000000 checkpoint.every=2 checkpoint.keep=4";
      Job job(*scene_, words("exec " + kPmix + " " + quickstart("failed", keys)));
      ASSERT_TRUE(eventually([&] { return steps_of("failed") > 10; }, kPatience)) << job.err();
      std::map<int, pid_t> others = processes_of(kQuickstart);
      ASSERT_EQ(others.size(), 4u);
      const pid_t victim = others.extract(rank).mapped();
      kill(victim, signal);
      expect_end_of_ranks(others, std::chrono::seconds(3));
      if (signal == SIGSTOP) kill(victim, SIGKILL);  // Slurm leaves a stopped task
      EXPECT_THAT(job.wait(), AllOf(Ne(0), Ne(-1))) << job.err();
      EXPECT_THAT(job.err(), ContainsRegex("zeroth: error: .*" + named(rank) + state));
      expect_no_ranks(kQuickstart);
    }
    const int64_t steps = steps_of("failed") + 20;
    const std::string keys = "train.steps=" + std::to_string(steps);
    const auto resumed = run(kPmix + " " + quickstart("resumed", always + keys + " checkpoint.resume=true"));
    EXPECT_EQ(resumed.code, 0) << resumed.output;
    EXPECT_LT(steps_of("resumed"), steps);
    EXPECT_EQ(trained("resumed").weights, on_one_host(keys, size_t(steps)).weights) << steps;
  }

  // The address and the port at which the store of the only job listens on the first node.
  std::pair<std::string, uint16_t> store() const {
    std::istringstream text(hosts().run(0, "ss -Hltn '\"sport >= 20000 and sport < 28008\"'"));
    std::string state, received, sent, at;
    text >> state >> received >> sent >> at;
    const auto colon = at.rfind(':');
    if (colon == std::string::npos) return {};
    return {at.substr(0, colon), static_cast<uint16_t>(std::stoi(at.substr(colon + 1)))};
  }
  // What the store answers to a process on the node.
  std::string answer_to(int node, const std::string& bytes) const {
    const auto [address, port] = store();
    return zr::testing::answer_on(hosts().connect(node, address, port), bytes);
  }
  static std::string join_request(const std::string& token) {
    return protocol::encode(protocol::JoinRequest{"srun-1.0", token, 1, 4, protocol::this_peer()});
  }
  // Starts a job, whose store has the address, and lets a process of the last node try.
  void expect_other_processes_cannot_join(const std::string& srun, const std::string& address) {
    const int node = hosts().count() - 1;
    const auto job = start_ranks(srun, "save_on_signal=1");
    ASSERT_TRUE(all_run(4)) << job->err();
    const auto [listens_on, port] = store();
    EXPECT_EQ(listens_on, address);
    std::mt19937 random(1);
    for (int i = 0; i < 20; ++i) {
      std::string bytes(1 + random() % 3000, '\0');
      for (char& c : bytes) c = static_cast<char>(random());
      EXPECT_EQ(answer_to(node, bytes), "");
    }
    const std::string report = protocol::Writer().text("rank 0 is lost").message(protocol::Type::report);
    EXPECT_EQ(answer_to(node, report), "");
    for (const std::string token : {"srun-1.0", ""})
      EXPECT_THAT(answer_to(node, join_request(token)), HasSubstr("this store belongs to another job"));
    std::vector<int> silent;  // more than the store keeps without a token
    for (int i = 0; i < 300; ++i) silent.push_back(hosts().connect(node, address, port));
    EXPECT_THAT(silent, Not(testing::Contains(-1)));
    const int64_t step = page().ranks[0].step;
    EXPECT_TRUE(eventually([&] { return page().ranks[0].step > step + 50; }, kPatience));
    run("scancel --signal=TERM 1");
    EXPECT_EQ(job->wait(), 0) << job->err();
    EXPECT_THAT(job->err(), Not(HasSubstr("zeroth")));
    for (const int connection : silent) close(connection);
  }

  static std::string escaped(std::string text) {
    for (auto at = text.find('\''); at != std::string::npos; at = text.find('\'', at + 4)) text.replace(at, 1, "'\\''");
    return text;
  }

  const Scratch scratch_;
  const std::string folder_ = scratch_.path("slurm");
  std::unique_ptr<Scene> scene_ = std::make_unique<Scene>();
  std::unique_ptr<Hosts> hosts_;
};

TEST_F(SrunTest, SLOW_TrainsTheBitsOfZerothLaunch) {
  ASSERT_NO_FATAL_FAILURE(start(1));
  const Trained expected = on_one_host();
  for (const std::string mpi : {"none", "pmi2", "pmix"}) {
    const auto done = run("srun -n 4 --mpi=" + mpi + " " + quickstart(mpi));
    EXPECT_EQ(done.code, 0) << done.output;
    for (const char* once : {"parameters, fp32, 4 ranks", "step 20/20  loss ", "trained 20 steps in "}) {
      const auto first = done.output.find(once);
      EXPECT_NE(first, std::string::npos) << mpi << done.output;
      EXPECT_EQ(done.output.rfind(once), first) << mpi << done.output;  // rank 0 alone prints
    }
    EXPECT_EQ(trained(mpi), expected) << mpi;
  }
  EXPECT_EQ(run("srun -n 4 --mpi=pmix " + quickstart("mpi", "train.steps=20 communicator=mpi")).code, 0);
  EXPECT_EQ(trained("mpi"), expected);
}

TEST_F(SrunTest, SLOW_TrainsTheBitsOfOneHostOnTwoNodes) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  for (const std::string strategy : {"zero1", "zero3"}) {
    const std::string keys = "train.steps=20 strategy=" + strategy;
    const Trained expected = on_one_host(keys);
    for (const std::string tasks : {"--ntasks-per-node=2", "--ntasks=4"}) {  // the latter: 3 and 1
      const auto done = run("env ZR_TOKEN=secret srun --nodes=2 --mpi=pmix " + tasks + " " + quickstart("two", keys));
      EXPECT_EQ(done.code, 0) << done.output;
      EXPECT_EQ(trained("two"), expected) << strategy << " " << tasks;
    }
  }
}

TEST_F(SrunTest, SLOW_OtherLaunchersTrainTheSameBitsInAnAllocation) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  const Trained expected = on_one_host();
  scratch_.write("job.sh",
                 "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2 --output=job.log\nset -e\n"
                 "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n"
                 "mpirun.openmpi --bind-to none -x ZR_TOKEN=secret -x ZR_STORE=$(hostname):29600 " +
                     quickstart("mpirun") +
                     "\nhosts=$(scontrol show hostnames | sed 's/$/:2/' | paste -sd,)\n" ZR_BUILD_DIR
                     "/bin/zeroth launch --hosts $hosts -- " +
                     quickstart("hosts") + "\n");
  const auto done = run("sbatch --wait job.sh");
  const std::string log = shell("cat " + scratch_.path("job.log")).output;
  EXPECT_EQ(done.code, 0) << done.output << log;
  for (const std::string text : {"plan: ", "trained 20 steps"}) {  // of rank 0 of each job
    std::size_t count = 0;
    for (std::size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) ++count;
    EXPECT_EQ(count, 2u) << text << "\n" << log;
  }
  EXPECT_EQ(trained("mpirun"), expected);
  EXPECT_EQ(trained("hosts"), expected);
}

TEST_F(SrunTest, SLOW_SaysHowRanksOfTwoNodesGetMpi) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  const auto none = run(kTwoNodes + " " + quickstart("none"));
  EXPECT_NE(none.code, 0);
  EXPECT_THAT(none.output, HasSubstr("communicator \"mpi\" needs ranks that MPI has started; start them with srun "
                                     "--mpi=pmix (srun --mpi=list prints what this Slurm has), or in an allocation of "
                                     "salloc or sbatch with mpirun or `zeroth launch --hosts`"));
  const auto pmi2 = run(kTwoNodes + " --mpi=pmi2 " + quickstart("pmi2"));
  EXPECT_THAT(pmi2.output, HasSubstr("warning: communicator \"mpi\": srun offers the ranks PMI-1 or PMI-2, which few "
                                     "builds of OpenMPI support; if OpenMPI ends the ranks now, start them with srun "
                                     "--mpi=pmix"));
}

TEST_F(SrunTest, SLOW_NamesTheNodeOfRank0IfItIsNotTheFirst) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  scratch_.write("nodes", hosts().name(1) + "\n" + hosts().name(0) + "\n");
  // srun may end a step before it has forwarded what a rank wrote to standard error.
  const std::string srun =
      "srun -n 2 --distribution=arbitrary --kill-on-bad-exit --error=error.%t " + rank_program() + " steps=3";
  run("env SLURM_HOSTFILE=nodes ZR_TOKEN=secret ZR_TEST_PAGE=" + scene_->page_file() + " " + srun);
  EXPECT_THAT(text_of(scratch_.path("error.0")),
              HasSubstr("srun has started rank 0 on " + hosts().name(1) +
                        ", but all ranks look for the job's store on " + hosts().name(0)));
  const auto given = run("env SLURM_HOSTFILE=nodes ZR_STORE=" + hosts().name(1) + ":29600 ZR_TOKEN=secret " +
                         "ZR_TEST_PAGE=" + scene_->page_file() + " " + srun);
  EXPECT_EQ(given.code, 0) << given.output;
}

TEST_F(SrunTest, SLOW_StartsRanksOfZerothTrainButNotSeveralLaunchers) {
  ASSERT_NO_FATAL_FAILURE(start(1));
  const std::string file = ZR_SOURCE_DIR "/examples/quickstart/quickstart.toml job.threads=1 train.steps=2 job.runs=";
  const std::string train = ZR_BUILD_DIR "/bin/zeroth train " + file;
  const auto several = run("srun -n 4 " + train + "several job.ranks=2");
  EXPECT_EQ(several.code, 0) << several.output;
  EXPECT_THAT(several.output, HasSubstr("4 ranks"));
  const auto one = run("srun -n 1 " + train + "one job.ranks=4");
  EXPECT_EQ(one.code, 0) << one.output;
  EXPECT_THAT(one.output, HasSubstr("4 ranks"));
  const auto launched =
      run("srun -n 4 " ZR_BUILD_DIR "/bin/zeroth launch -n 2 -- " ZR_BUILD_DIR "/bin/quickstart " + file + "launched");
  EXPECT_EQ(launched.code, 2);
  EXPECT_THAT(launched.output, HasSubstr("zeroth: error: srun has started this command 4 times, and each would start "
                                         "all ranks of a job: start the program with srun instead"));
  EXPECT_FALSE(fs::exists(scratch_.path("launched")));
}

TEST_F(SrunTest, AKilledRankEndsTheJobAndIsNamed) {
  ASSERT_NO_FATAL_FAILURE(start(1));
  for (const int victim : {0, 2}) {
    scene_ = std::make_unique<Scene>();
    const auto job = start_ranks("srun -n 3", "steps=1000000");
    ASSERT_TRUE(all_run(3)) << job->err();
    const std::string pid = std::to_string(page().ranks[size_t(victim)].pid);
    kill(page().ranks[size_t(victim)].pid, SIGKILL);
    EXPECT_THAT(job->wait(), AllOf(Ne(0), Ne(-1))) << job->err();
    EXPECT_THAT(job->err(), HasSubstr("rank " + std::to_string(victim) + " (pid " + pid + ")"));
    EXPECT_THAT(job->err(), HasSubstr("is lost: its connection closed"));
    expect_no_ranks();
  }
}

TEST_F(SrunTest, SLOW_AKilledRankOfTwoNodesEndsTheJobAndIsNamed) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  for (const int victim : {0, 3}) {
    scene_ = std::make_unique<Scene>();
    const auto job = start_ranks(kTwoNodes, "steps=1000000");
    ASSERT_TRUE(all_run(4)) << job->err();
    const std::string pid = std::to_string(page().ranks[size_t(victim)].pid);  // in its PID namespace
    const std::map<int, pid_t> ranks = processes_of();
    ASSERT_EQ(ranks.size(), 4u);
    kill(ranks.at(victim), SIGKILL);
    expect_end_of_ranks(ranks, std::chrono::milliseconds(1500));
    EXPECT_THAT(job->wait(), AllOf(Ne(0), Ne(-1))) << job->err();
    EXPECT_THAT(job->err(), ContainsRegex(named(victim, pid) + " is lost: its connection closed"));
    EXPECT_THAT(job->err(), ContainsRegex("rank 1  pid [0-9]+ +" + hosts().name(0)));
    expect_no_ranks();
  }
}

TEST_F(SrunTest, SLOW_AStoppedRankEndsTheJobAndIsNamed) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  for (const int victim : {0, 3}) {
    scene_ = std::make_unique<Scene>();
    const auto job = start_ranks(kTwoNodes, "steps=1000000 timeout_ms=1500");
    ASSERT_TRUE(all_run(4)) << job->err();
    const std::string pid = std::to_string(page().ranks[size_t(victim)].pid);
    std::map<int, pid_t> others = processes_of();
    ASSERT_EQ(others.size(), 4u);
    const pid_t stopped = others.extract(victim).mapped();
    kill(stopped, SIGSTOP);
    expect_end_of_ranks(others, std::chrono::milliseconds(1500));
    kill(stopped, SIGKILL);  // Slurm leaves a stopped task
    EXPECT_THAT(job->wait(), AllOf(Ne(0), Ne(-1))) << job->err();
    EXPECT_THAT(job->err(), ContainsRegex(named(victim, pid) + " has not answered for [0-9.]+s"));
    expect_no_ranks();
  }
}

TEST_F(SrunTest, SLOW_ATrainingJobResumesAfterAKilledRank) {
  expect_resumes_after(SIGKILL, 3, " is lost: its connection closed");
}

TEST_F(SrunTest, SLOW_ATrainingJobResumesAfterAKilledRank0) {
  expect_resumes_after(SIGKILL, 0, " is lost: its connection closed");
}

TEST_F(SrunTest, SLOW_ATrainingJobResumesAfterAStoppedRank) {
  expect_resumes_after(SIGSTOP, 3, " has not answered for [0-9.]+s");
}

// srun itself waits for the daemon of a node that it cannot reach.
TEST_F(SrunTest, SLOW_ALostNodeEndsTheRanksAndIsNamed) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  const std::string keys = "train.steps=100000000 communicator.timeout=2s";
  Job job(*scene_, words("exec " + kPmix + " " + quickstart("run", keys)));
  ASSERT_TRUE(eventually([&] { return steps_of("run") > 0; }, kPatience)) << job.err();
  const std::map<int, pid_t> ranks = processes_of(kQuickstart);
  ASSERT_EQ(ranks.size(), 4u);
  hosts().cut(1);
  expect_end_of_ranks(ranks, std::chrono::seconds(2));
  const std::regex named("rank [23] .pid [0-9]+. has not answered for [0-9.]+s");
  EXPECT_TRUE(eventually([&] { return std::regex_search(job.err(), named); }, kPatience)) << job.err();
  hosts().restore(1);
  for (const pid_t srun : hosts().processes(0, "srun")) kill(srun, SIGKILL);
  job.wait();
}

TEST_F(SrunTest, OtherProcessesCannotJoinOrEndAJobOnOneNode) {
  ASSERT_NO_FATAL_FAILURE(start(1));
  expect_other_processes_cannot_join("srun -n 4", "127.0.0.1");
}

TEST_F(SrunTest, OtherProcessesCannotJoinOrEndAJobOnTwoNodesWithAToken) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  expect_other_processes_cannot_join(kTwoNodes, "10.77.0.1");
}

TEST_F(SrunTest, FailsOnTwoNodesWithoutAToken) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  const auto job = start_ranks("srun --nodes=2 --ntasks-per-node=2", "steps=3");
  EXPECT_EQ(job->wait(), zr::exit_code::environment) << job->err();
  EXPECT_THAT(job->err(), HasSubstr("Set one before srun, export ZR_TOKEN="));
  expect_no_ranks();
}

// Slurm sends SIGTERM, and SIGKILL 30 s later (KillWait).
TEST_F(SrunTest, SLOW_ACancelledJobSavesACheckpoint) {
  ASSERT_NO_FATAL_FAILURE(start(2));
  const std::string keys = "train.steps=100000000 checkpoint.dir=" + scratch_.path("c") + " checkpoint.on_signal=save";
  Job job(*scene_, words("exec " + kPmix + " " + quickstart("run", keys)));
  const auto rows = [&] { return std::ifstream(scratch_.path("runs/run/metrics.jsonl")).peek() != EOF; };
  ASSERT_TRUE(eventually(rows, kPatience)) << job.err();
  run("scancel 1");
  EXPECT_NE(job.wait(kPatience), -1) << job.err();
  EXPECT_EQ(summary("run").at("stopped_by"), "SIGTERM") << job.err();
  EXPECT_EQ(summary("run").at("checkpoints").at("saved"), 1);
}

TEST_F(SrunTest, ClusterLeavesNoProcessAndNoFile) {
  scratch_.write("bin/slurmd", "#!/bin/sh\nexit 1\n");
  fs::permissions(scratch_.path("bin/slurmd"), fs::perms::owner_all);
  const auto failed = shell("PATH=" + scratch_.path("bin") + ":$PATH " + kScript + " up " + folder_ + " 2");
  EXPECT_NE(failed.code, 0) << failed.output;
  std::smatch munged;  // in its log, which `up` prints
  ASSERT_TRUE(std::regex_search(failed.output, munged, std::regex("Starting munge.* daemon .pid ([0-9]+)")));
  EXPECT_TRUE(gone(std::stoi(munged[1])));
  EXPECT_FALSE(fs::exists(folder_));
  ASSERT_NO_FATAL_FAILURE(start(2));
  const auto job = start_ranks("env ZR_TOKEN=secret srun --nodes=2 --ntasks=4", "steps=1000000");
  ASSERT_TRUE(all_run(4)) << job->err();
  std::vector<pid_t> pids;
  for (const int node : {0, 1})
    for (const auto& process : hosts().processes(node)) pids.push_back(process.pid);
  EXPECT_GT(pids.size(), 10u);  // daemons, srun, a process of Slurm for the ranks of each node, ranks
  EXPECT_EQ(shell(kScript + " down " + folder_).code, 0);
  EXPECT_FALSE(fs::exists(folder_));
  EXPECT_FALSE(fs::exists("/run/netns/" + hosts().name(0)));
  for (const pid_t pid : pids) EXPECT_TRUE(eventually([&] { return gone(pid); })) << pid;
}

}  // namespace
