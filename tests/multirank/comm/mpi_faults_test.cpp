// Jobs of `zeroth launch --hosts` and mpirun while ranks, hosts and links fail: all processes on all hosts end in time,
// the message names the origin, and a resumed job has the weights of one that was not interrupted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

#include "control/protocol.hpp"
#include "simulators/network_hosts.hpp"
#include "support/launch_job.hpp"
#include "support/sanitizers.hpp"
#include "support/text_of.hpp"

namespace {

namespace fs = std::filesystem;
namespace protocol = zr::host::control::protocol;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using zr::test::Clock;
using zr::test::eventually;
using zr::test::Job;
using zr::test::milliseconds;
using zr::test::variable_of;
using zr::testing::Hosts;

constexpr int kTimeoutSeconds = 3, kLongTimeoutSeconds = 30;  // communicator.timeout; of a job without a fault
// Until all processes have ended.
constexpr auto kLimit = std::chrono::seconds(kTimeoutSeconds + 5) * (zr::test::kSanitized ? 4 : 1);
constexpr milliseconds kPatience(60000);
const std::string kProgram = ZR_BUILD_DIR "/bin/quickstart";
const std::string kEndless = "train.steps=100000000 ";
const zr::test::Environment kAsRoot{{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}};

// The folder of a test, its run folders, and its checkpoints.
class Training {
 public:
  /// Starts the quickstart example. start: a launcher's command. name: of the run.
  Job start(const std::string& start, const std::string& name, const std::string& keys) {
    return Job(scene_,
               {"sh", "-c",
                "exec env " + start + " " + kProgram +
                    " " ZR_SOURCE_DIR "/examples/quickstart/quickstart.toml job.threads=1 checkpoint.dir=" +
                    (scene_.folder() / "checkpoints").string() + " job.runs=" + (scene_.folder() / "runs").string() +
                    " job.name=" + name + " " + keys},
               kAsRoot);
  }
  /// A command that starts a rank with a file of its own as stderr, which stderr_of() returns.
  std::string with_own_stderr() const {
    const fs::path script = scene_.folder() / "own_stderr.sh";
    std::ofstream(script) << "exec \"$@\" 2> " << (scene_.folder() / "rank").string() << "$OMPI_COMM_WORLD_RANK\n";
    return " sh " + script.string();
  }
  std::string stderr_of(int rank) const {
    return zr::testing::text_of(scene_.folder() / ("rank" + std::to_string(rank)));
  }
  int steps(const std::string& run) const {
    std::ifstream metrics(file(run, "metrics.jsonl"));
    return static_cast<int>(std::count(std::istreambuf_iterator<char>(metrics), {}, '\n'));
  }
  nlohmann::json weights_hash(const std::string& run) const {
    const auto summary = nlohmann::json::parse(std::ifstream(file(run, "summary.json")), nullptr, false);
    return summary.is_object() ? summary.value("weights_hash", nlohmann::json()) : nlohmann::json();
  }
  /// The step of the newest checkpoint, or 0.
  int newest_checkpoint() const {
    int newest = 0;
    std::error_code error;
    for (const auto& folder : fs::directory_iterator(scene_.folder() / "checkpoints", error))
      if (const fs::path name = folder.path().filename();
          name.extension().empty() && name.string().rfind("step-", 0) == 0)
        newest = std::max(newest, std::stoi(name.string().substr(5)));
    return newest;
  }

 private:
  fs::path file(const std::string& run, const std::string& name) const { return scene_.folder() / "runs" / run / name; }
  zr::test::Scene scene_;
};

std::string job_keys(const Hosts& hosts, int ranks_per_host, const std::string& job,
                     int timeout_seconds = kTimeoutSeconds) {
  return job + " communicator=auto communicator.mpi.hierarchy_min_bytes=0 communicator.timeout=" +
         std::to_string(timeout_seconds) + "s job.ranks=" + std::to_string(hosts.count() * ranks_per_host) + " ";
}

std::string keys(const Hosts& hosts, int ranks_per_host, int timeout_seconds = kTimeoutSeconds) {
  return job_keys(hosts, ranks_per_host, "strategy=zero1", timeout_seconds);
}

bool none_left(const Hosts& hosts) {
  for (int host = 0; host < hosts.count(); ++host)
    if (!hosts.processes(host).empty()) return false;
  return true;
}

const std::string kIsLost = "is lost: its connection closed", kIsSilent = "has not answered for [0-9.]+s";

// Sends a signal to a rank on this host, and returns how messages name the rank.
std::string signal_rank(const Hosts& hosts, int host, int signal) {
  const std::vector<pid_t> ranks = hosts.processes(host, kProgram);
  if (ranks.empty()) return "a rank that does not run";
  const std::string rank = variable_of(ranks.back(), "OMPI_COMM_WORLD_RANK");
  ::kill(ranks.back(), signal);
  return "rank " + rank + " \\(pid [0-9]+\\) ";
}

std::string kill_rank(const Hosts& hosts) { return signal_rank(hosts, 1, SIGKILL) + kIsLost; }
std::string stop_rank(const Hosts& hosts) { return signal_rank(hosts, 1, SIGSTOP) + kIsSilent; }
std::string stop_rank_beside_launcher(const Hosts& hosts) {
  return signal_rank(hosts, 0, SIGSTOP) + kIsSilent + ", and its process is stopped \\(T\\)";
}
// mpirun may notice it before its ranks have closed their connections, and kill those beside it: only the table, with
// the ranks' hosts, is sure to name it.
std::string kill_last_host(const Hosts& hosts) {
  hosts.kill(hosts.count() - 1);
  return hosts.name(hosts.count() - 1) + " +" + kIsLost;
}
// Without the launcher of `zeroth`, which has the store, mpirun may also kill rank 0 first: then only mpirun names it.
std::string kill_last_host_under_mpirun(const Hosts& hosts) {
  return "(" + kill_last_host(hosts) + "|on node " + hosts.name(hosts.count() - 1) + ")";
}
std::string cut_link_of_last_host(const Hosts& hosts) {
  hosts.cut(hosts.count() - 1);
  return "rank 3 \\(pid [0-9]+\\) " + kIsSilent;
}
std::string power_off_last_host(const Hosts& hosts) {
  const std::string named = cut_link_of_last_host(hosts);
  hosts.kill(hosts.count() - 1);
  return named;
}
std::string cut_link_of_launcher(const Hosts& hosts) {
  hosts.cut(0);
  return "rank 1 \\(pid [0-9]+\\) " + kIsSilent;
}

// Rank 0 runs the store if mpirun has started the ranks.
const std::string kStore = ", which runs the job's store, ";
// Sends a signal to rank 0 and returns its pid.
std::string signal_rank_0(const Hosts& hosts, int signal) {
  for (const pid_t pid : hosts.processes(0, kProgram)) {
    if (variable_of(pid, "OMPI_COMM_WORLD_RANK") != "0") continue;
    ::kill(pid, signal);
    return std::to_string(pid);
  }
  return "of rank 0, which does not run";
}
// mpirun names the rank too, and may kill the others before they do: SrunTest tests that they name it.
std::string kill_rank_0(const Hosts& hosts) {
  const std::string pid = signal_rank_0(hosts, SIGKILL);
  return "(rank 0 \\(pid " + pid + "\\)" + kStore + kIsLost + "|process rank 0 with PID [0-9]+ on node " +
         hosts.name(0) + " exited on signal 9)";
}
std::string stop_rank_0(const Hosts& hosts) {
  return "rank 0 \\(pid " + signal_rank_0(hosts, SIGSTOP) + "\\)" + kStore + kIsSilent;
}
std::string cut_link_of_rank_0(const Hosts& hosts) {
  hosts.cut(0);
  return "rank 0 \\(pid [0-9]+\\)" + kStore + kIsSilent;
}

struct Fault {
  const char* name;
  int hosts, ranks_per_host;
  std::string (*occur)(const Hosts&);  // returns how the report names the origin
  std::string_view job = "strategy=zero1";
  bool cuts_off_mpirun = false;  // it does not get what the ranks on other hosts print

  std::string keys(const Hosts& of, int timeout_seconds = kTimeoutSeconds) const {
    return job_keys(of, ranks_per_host, std::string(job), timeout_seconds);
  }
};

// All processes must end in time, after a report that names the origin.
void expect_end(const Hosts& hosts, Job& job, const Fault& fault) {
  const auto begin = Clock::now();
  const std::string named = fault.occur(hosts);
  const int code = job.wait(kPatience);
  EXPECT_TRUE(eventually([&] { return none_left(hosts); }, kPatience));
  EXPECT_LE(Clock::now() - begin, kLimit);
  EXPECT_EQ(code, 4) << job.err();
  EXPECT_THAT(job.err(), ContainsRegex("zeroth: error: .*" + named));
}

constexpr const char* kCheckpoints = "checkpoint.every=2 checkpoint.keep=4";
constexpr std::string_view kQuantized =
    "strategy=zero3 strategy.zero3.persistence_threshold=0 communicator.gradients=int8 communicator.weights=int8";
constexpr std::string_view kOneBitAdam = "strategy=zero2 optimizer=onebit_adam optimizer.onebit_adam.freeze_step=1";

class CommMpiHostFaultsTest : public testing::TestWithParam<Fault> {};

TEST_P(CommMpiHostFaultsTest, EndTheJobWhichResumesToTheSameWeights) {
  const Fault& fault = GetParam();
  const int ranks = fault.ranks_per_host;
  Training training;
  {
    const Hosts hosts(fault.hosts);
    if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
    Job job = training.start(hosts.launch(ranks), "failed", fault.keys(hosts) + kEndless + kCheckpoints);
    ASSERT_TRUE(eventually([&] { return training.newest_checkpoint() > 2; }, kPatience)) << job.err();
    expect_end(hosts, job, fault);
  }
  const Hosts hosts(fault.hosts);
  const std::string steps = "train.steps=" + std::to_string(training.newest_checkpoint() + 20) + " ";
  Job resumed = training.start(hosts.launch(ranks), "resumed",
                               fault.keys(hosts, kLongTimeoutSeconds) + steps + "checkpoint.resume=true");
  ASSERT_EQ(resumed.wait(kPatience), 0) << resumed.err();
  // Rounded gradients depend on the hosts, all else does not.
  Job reference = fault.job == kQuantized
                      ? training.start(hosts.launch(ranks), "reference", fault.keys(hosts, kLongTimeoutSeconds) + steps)
                      : training.start(ZR_BUILD_DIR "/bin/zeroth launch -n 4 --", "reference",
                                       std::string(fault.job) + " " + steps + "job.ranks=4");
  ASSERT_EQ(reference.wait(kPatience), 0) << reference.err();
  EXPECT_TRUE(training.weights_hash("reference").is_string());
  EXPECT_EQ(training.weights_hash("resumed"), training.weights_hash("reference")) << steps;
}

INSTANTIATE_TEST_SUITE_P(SLOW_Faults, CommMpiHostFaultsTest,
                         testing::Values(Fault{"KilledRank", 2, 2, kill_rank}, Fault{"StoppedRank", 2, 2, stop_rank},
                                         Fault{"StoppedRankBesideTheLauncher", 2, 2, stop_rank_beside_launcher},
                                         Fault{"KilledHost", 2, 2, kill_last_host},
                                         Fault{"KilledHostOfFour", 4, 1, kill_last_host},
                                         Fault{"HostOfFourWithoutPower", 4, 1, power_off_last_host},
                                         Fault{"CutLink", 2, 2, cut_link_of_last_host},
                                         Fault{"CutLinkOfOneOfFour", 4, 1, cut_link_of_last_host},
                                         Fault{"CutLinkOfTheLauncher", 4, 1, cut_link_of_launcher},
                                         Fault{"KilledRankOfQuantizedZero3", 2, 2, kill_rank, kQuantized},
                                         Fault{"CutLinkOfOneBitAdam", 2, 2, cut_link_of_last_host, kOneBitAdam}),
                         [](const auto& info) { return info.param.name; });

std::vector<pid_t> ranks_on(const Hosts& hosts) {
  std::vector<pid_t> ranks;
  for (int host = 0; host < hosts.count(); ++host)
    for (const pid_t pid : hosts.processes(host, kProgram)) ranks.push_back(pid);
  return ranks;
}

// mpirun has started the ranks, of which rank 0 runs the store. mpirun itself is not ours.
class CommMpiMpirunFaultsTest : public testing::TestWithParam<Fault> {};

TEST_P(CommMpiMpirunFaultsTest, EndAllRanksAndNameTheCulprit) {
  const Fault& fault = GetParam();
  Training training;
  {
    const Hosts hosts(fault.hosts);
    if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
    const std::string start =
        hosts.mpirun(fault.ranks_per_host) + (fault.cuts_off_mpirun ? training.with_own_stderr() : "");
    Job job = training.start(start, "failed", fault.keys(hosts) + kEndless + kCheckpoints);
    ASSERT_TRUE(eventually([&] { return training.newest_checkpoint() > 2; }, kPatience)) << job.err();
    const std::vector<pid_t> ranks = ranks_on(hosts);
    EXPECT_EQ(ranks.size(), 4u);
    const auto begin = Clock::now();
    const std::string named = fault.occur(hosts);
    EXPECT_TRUE(eventually([&] { return std::all_of(ranks.begin(), ranks.end(), zr::test::gone); }, kPatience));
    EXPECT_LE(Clock::now() - begin, kLimit);
    for (int host = 1; host < hosts.count(); ++host)
      EXPECT_TRUE(eventually([&] { return hosts.processes(host).empty(); }, kPatience)) << "a daemon of mpirun";
    for (const Hosts::Process& process : hosts.processes(0))  // mpirun may wait for a daemon behind a cut link
      ::kill(process.pid, SIGKILL);
    EXPECT_NE(job.wait(kPatience), 0);
    if (!fault.cuts_off_mpirun) {
      EXPECT_THAT(job.err(), ContainsRegex(named));
    } else {
      for (int rank = fault.ranks_per_host; rank < hosts.count() * fault.ranks_per_host; ++rank)
        EXPECT_THAT(training.stderr_of(rank), ContainsRegex("zeroth: error: .*" + named)) << rank;
    }
  }
  const Hosts hosts(fault.hosts);
  const std::string steps = "train.steps=" + std::to_string(training.newest_checkpoint() + 20) + " ";
  Job resumed = training.start(hosts.mpirun(fault.ranks_per_host), "resumed",
                               fault.keys(hosts, kLongTimeoutSeconds) + steps + "checkpoint.resume=true");
  ASSERT_EQ(resumed.wait(kPatience), 0) << resumed.err();
  Job reference =
      training.start(ZR_BUILD_DIR "/bin/zeroth launch -n 4 --", "reference", "strategy=zero1 " + steps + "job.ranks=4");
  ASSERT_EQ(reference.wait(kPatience), 0) << reference.err();
  EXPECT_TRUE(training.weights_hash("reference").is_string());
  EXPECT_EQ(training.weights_hash("resumed"), training.weights_hash("reference")) << steps;
}

INSTANTIATE_TEST_SUITE_P(SLOW_Faults, CommMpiMpirunFaultsTest,
                         testing::Values(Fault{"KilledRank", 2, 2, kill_rank}, Fault{"StoppedRank", 2, 2, stop_rank},
                                         Fault{"KilledHost", 2, 2, kill_last_host_under_mpirun},
                                         Fault{"CutLink", 2, 2, cut_link_of_last_host},
                                         Fault{"KilledRank0", 2, 2, kill_rank_0},
                                         Fault{"StoppedRank0", 2, 2, stop_rank_0},
                                         Fault{"CutLinkOfRank0", 4, 1, cut_link_of_rank_0, "strategy=zero1", true}),
                         [](const auto& info) { return info.param.name; });

// TCP sends what was lost again after a pause that may be as long as the loss.
TEST(CommMpiFaultsTest, SLOW_AJobContinuesAfterTwoSecondsInWhichAllPacketsAreLost) {
  const Hosts hosts(2);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  hosts.limit_rate("50mbit");  // so that the job takes seconds
  Training training;
  const std::string steps = "train.steps=150 ";
  Job job = training.start(hosts.launch(2), "run", keys(hosts, 2, kLongTimeoutSeconds) + steps);
  ASSERT_TRUE(eventually([&] { return training.steps("run") > 0; }, kPatience)) << job.err();
  for (const int host : {0, 1}) hosts.lose(host);
  std::this_thread::sleep_for(milliseconds(500));
  const int done = training.steps("run");
  std::this_thread::sleep_for(milliseconds(1500));
  EXPECT_EQ(training.steps("run"), done) << "packets arrive";
  EXPECT_LT(done, 150);
  for (const int host : {0, 1}) hosts.restore(host);
  ASSERT_EQ(job.wait(kPatience), 0) << job.err();
  Job reference =
      training.start(ZR_BUILD_DIR "/bin/zeroth launch -n 4 --", "reference", "strategy=zero1 " + steps + "job.ranks=4");
  ASSERT_EQ(reference.wait(kPatience), 0) << reference.err();
  EXPECT_TRUE(training.weights_hash("reference").is_string());
  EXPECT_EQ(training.weights_hash("run"), training.weights_hash("reference"));
}

// The store's answer to a process on the second host.
std::string answer_to(const Hosts& hosts, const std::string& bytes) {
  return zr::testing::answer_on(hosts.connect_to_store(1), bytes);
}

// The addresses on which processes of this program listen on the first host, or on which any does on this port.
std::vector<std::string> listening(const Hosts& hosts, const std::string& program, const std::string& port = "") {
  std::istringstream lines(hosts.run(0, "ss -Hltnp"));
  std::vector<std::string> addresses;
  for (std::string line, state, queued, most, address; std::getline(lines, line);) {
    std::istringstream words(line);
    words >> state >> queued >> most >> address;
    if (line.find("((\"" + program + "\",") != std::string::npos && address.ends_with(port))
      addresses.push_back(address);
  }
  return addresses;
}

TEST(CommMpiFaultsTest, SLOW_TheStoreListensOnTheAddressThatTheLauncherWasToldOnly) {
  const Hosts hosts(2);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  Training training;
  Job job = training.start(hosts.launch(2), "launched", keys(hosts, 2) + kEndless);
  ASSERT_TRUE(eventually([&] { return training.steps("launched") > 0; }, kPatience)) << job.err();
  const std::string store = "10.77.0.1:" + std::to_string(Hosts::kStorePort);
  EXPECT_THAT(listening(hosts, "zeroth"), ElementsAre(store));
  for (const pid_t launcher : hosts.processes(0, ZR_BUILD_DIR "/bin/zeroth")) ::kill(launcher, SIGTERM);
  job.wait(kPatience);
  Job other = training.start(hosts.mpirun(2), "started", keys(hosts, 2) + kEndless);
  ASSERT_TRUE(eventually([&] { return training.steps("started") > 0; }, kPatience)) << other.err();
  EXPECT_THAT(listening(hosts, "quickstart", ":" + std::to_string(Hosts::kStorePort)), ElementsAre(store));
  for (const pid_t rank : hosts.processes(0, kProgram)) ::kill(rank, SIGKILL);
  other.wait(kPatience);
}

TEST(CommMpiFaultsTest, AProcessWithoutTheTokenCannotJoinOrEndTheJob) {
  const Hosts hosts(2);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  Training training;
  Job job = training.start(hosts.launch(2), "run", keys(hosts, 2) + kEndless + "checkpoint.on_signal=save");
  ASSERT_TRUE(eventually([&] { return training.steps("run") > 0; }, kPatience)) << job.err();
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    std::string bytes(1 + random() % 3000, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    EXPECT_EQ(answer_to(hosts, bytes), "");
  }
  const std::string report = protocol::Writer().text("rank 0 is lost").message(protocol::Type::report);
  EXPECT_EQ(answer_to(hosts, report), "");
  const std::vector<pid_t> ranks = hosts.processes(0, kProgram);
  ASSERT_FALSE(ranks.empty());
  const std::string name = variable_of(ranks[0], "ZR_JOB"), token = variable_of(ranks[0], "ZR_TOKEN");
  ASSERT_EQ(token.size(), 32u);
  for (const std::string& guess : {std::string(), name, std::string(32, '0'), token.substr(0, 31)}) {
    const std::string join = protocol::encode(protocol::JoinRequest{name, guess, 3, 4, protocol::this_peer()});
    EXPECT_THAT(answer_to(hosts, join + report), HasSubstr("this store belongs to another job")) << guess;
  }
  const int steps = training.steps("run");
  EXPECT_TRUE(eventually([&] { return training.steps("run") > steps; }, kPatience)) << job.err();
  for (const pid_t launcher : hosts.processes(0, ZR_BUILD_DIR "/bin/zeroth")) ::kill(launcher, SIGTERM);
  EXPECT_EQ(job.wait(kPatience), 0) << job.err();
  EXPECT_THAT(job.err(), Not(HasSubstr("error")));
}

}  // namespace
