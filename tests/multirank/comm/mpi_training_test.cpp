// Training over comm_mpi, on one host and on two: the bits of comm_shm, the bytes between the hosts, lost ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "simulators/network_hosts.hpp"
#include "support/launch_job.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using testing::HasSubstr;
using testing::Not;
using zr::testing::Hosts;
using zr::testing::shell;

// What a job of the quickstart example prints into its summary: hash of the weights, and communication.
nlohmann::json summary_of(const zr::test::Scratch& scratch, const std::string& start, const std::string& keys) {
  const auto done =
      shell("cd " + scratch.folder().string() +
            " && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; " + start +
            " " ZR_BUILD_DIR "/bin/quickstart " ZR_SOURCE_DIR
            "/examples/quickstart/quickstart.toml train.steps=20 job.threads=1 job.name=run job.runs=runs " +
            keys);
  EXPECT_EQ(done.code, 0) << start << " " << keys << done.output;
  // Rank 0 alone prints, under every launcher.
  for (const std::string once : {"parameters, fp32, ", "step 20/20  loss ", "trained 20 steps in ", "run folder: "}) {
    const auto lines = done.lines();
    const auto has = [&](const std::string& line) { return line.find(once) != std::string::npos; };
    EXPECT_EQ(std::count_if(lines.begin(), lines.end(), has), 1) << start << " " << once << done.output;
  }
  return nlohmann::json::parse(std::ifstream(scratch.path("runs/run/summary.json")), nullptr, false);
}

// Starts a program on hosts that its ranks pretend to be on, two on each but the last.
std::string on_pretended_hosts(const std::string& ranks) {
  return "mpirun.openmpi --bind-to none --oversubscribe -n " + ranks +
         " sh -c 'ZR_HOST_ID=$((OMPI_COMM_WORLD_RANK / 2)) exec \"$@\"' sh";
}

TEST(CommMpiTrainingTest, SLOW_HasTheBitsOfShm) {
  const zr::test::Scratch scratch;
  for (const std::string strategy : {"zero1", "zero3"})
    for (const std::string ranks : {"2", "4"}) {
      const std::string keys = "strategy=" + strategy + " job.ranks=" + ranks + " communicator.share_weights=false ";
      const auto shm = summary_of(scratch, ZR_BUILD_DIR "/bin/zeroth launch -n " + ranks + " --", keys);
      const auto mpi =
          summary_of(scratch, "mpirun.openmpi --bind-to none --oversubscribe -n " + ranks, keys + "communicator=mpi");
      EXPECT_EQ(mpi.at("weights_hash"), shm.at("weights_hash")) << keys;
    }
}

// Hosts that the ranks only pretend to be on: two ranks on the first one, and as many or one on the second.
TEST(CommMpiTrainingTest, SLOW_HasTheBitsOfShmWithSeveralRanksOnAHost) {
  const zr::test::Scratch scratch;
  for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3"})
    for (const std::string dtype : {"fp32", "bf16"}) {
      const std::string ranks = strategy == "zero1" || strategy == "zero3" ? "4" : "3";
      const std::string keys = "strategy=" + strategy + " gradients.reduce_dtype=" + dtype + " job.ranks=" + ranks +
                               " communicator.share_weights=false ";
      const auto shm = summary_of(scratch, ZR_BUILD_DIR "/bin/zeroth launch -n " + ranks + " --", keys);
      const auto mpi = summary_of(scratch, on_pretended_hosts(ranks),
                                  keys + "communicator=mpi communicator.mpi.hierarchy_min_bytes=0");
      EXPECT_EQ(mpi.at("weights_hash"), shm.at("weights_hash")) << keys;
    }
}

// Sums per host differ from those in rank order by roundings, and are the same in every run.
TEST(CommMpiTrainingTest, SLOW_AnyOrderRepeatsItsBitsAndReachesTheLossOfTheExactOrder) {
  const zr::test::Scratch scratch;
  const auto train = [&](const std::string& exact) {
    return summary_of(scratch, on_pretended_hosts("4"),
                      "strategy=zero1 job.ranks=4 communicator=mpi communicator.mpi.hierarchy_min_bytes=0 "
                      "communicator.exact=" +
                          exact);
  };
  const auto exact = train("true"), first = train("false"), second = train("false");
  EXPECT_EQ(first.at("weights_hash"), second.at("weights_hash"));
  EXPECT_NE(first.at("weights_hash"), exact.at("weights_hash"));
  EXPECT_NEAR(first.at("loss").get<double>(), exact.at("loss").get<double>(), 1e-4 * exact.at("loss").get<double>());
}

// Without sharing, rank 0 has all weights; on one host it counts a part of the copy for all ranks, on several hosts a
// part of its host's copy. Then a host receives the weights that the other one has updated once.
TEST(CommMpiTrainingTest, RanksOfAHostShareWeights) {
  const zr::test::Scratch scratch;
  const auto weights = [](const nlohmann::json& summary) {
    const auto& kinds = summary.at("memory").at("device").at("weights");
    EXPECT_EQ(kinds.at("planned"), kinds.at("peak"));
    return kinds.at("peak").get<double>();
  };
  const auto gathered = [](const nlohmann::json& summary) {
    return summary.at("communication_bytes").value("all_gather", int64_t{0});
  };
  for (const auto& [strategy, ranks] : {std::pair<std::string, int>{"zero1", 3},
                                        {"zero2 gradients.reduce_dtype=bf16", 4},
                                        {"zero3 strategy.zero3.shard_within=host", 4}}) {
    const std::string n = std::to_string(ranks), keys = "strategy=" + strategy + " job.ranks=" + n + " ";
    const std::string start = on_pretended_hosts(n),
                      mpi_keys = keys + "communicator=mpi communicator.mpi.hierarchy_min_bytes=0";
    const auto shm = summary_of(scratch, ZR_BUILD_DIR "/bin/zeroth launch -n " + n + " --", keys);
    const auto shared = summary_of(scratch, start, mpi_keys);
    EXPECT_EQ(shared.at("weights_hash"), shm.at("weights_hash")) << keys;
    EXPECT_NEAR(weights(shared), ranks * weights(shm) / 2, 64) << keys;
    EXPECT_EQ(gathered(shm), 0) << keys;
    EXPECT_GT(gathered(shared), 0) << keys;
    if (strategy != "zero1") continue;
    const auto replicas = summary_of(scratch, start, mpi_keys + " communicator.share_weights=false");
    EXPECT_EQ(replicas.at("weights_hash"), shm.at("weights_hash")) << keys;
    EXPECT_NEAR(weights(replicas), 2 * weights(shared), 64) << keys;
    EXPECT_EQ(gathered(replicas), gathered(shared) * (ranks - 1)) << keys;
  }
}

TEST(CommMpiTrainingTest, AKilledRankEndsTheJobAndIsNamed) {
  const zr::test::Scratch scratch;
  const std::string name = "killed" + std::to_string(::getpid());
  const auto done =
      shell("cd " + scratch.folder().string() +
            " && exec 2>&1; export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; timeout 60 "
            "mpirun.openmpi --bind-to none --oversubscribe -n 3 " ZR_BUILD_DIR "/bin/quickstart " ZR_SOURCE_DIR
            "/examples/quickstart/quickstart.toml communicator=mpi train.steps=100000000 job.threads=1 "
            "job.ranks=3 job.runs=runs job.name=" +
            name + " & until [ -s runs/" + name +
            "/metrics.jsonl ]; do sleep 0.1; done; killed=$(pgrep -n -f '^" ZR_BUILD_DIR "/bin/quickstart .*job.name=" +
            name +
            "'); rank=$(tr '\\0' '\\n' < /proc/$killed/environ | sed -n 's/^OMPI_COMM_WORLD_RANK=//p'); kill -9 "
            "$killed; wait $!; "
            "code=$?; echo killed $rank $killed; pgrep -f job.name=" +
            name + " -a | grep -v pgrep; exit $code");
  EXPECT_THAT(done.code, testing::AllOf(testing::Ne(0), testing::Ne(124))) << done.output;
  std::smatch killed;
  ASSERT_TRUE(std::regex_search(done.output, killed, std::regex("killed ([012]) ([0-9]+)"))) << done.output;
  EXPECT_THAT(done.output,
              HasSubstr("rank " + killed[1].str() + " (pid " + killed[2].str() + ") is lost: its connection closed"));
  EXPECT_EQ(done.output.find("bin/quickstart /"), std::string::npos) << "a rank is left: " << done.output;
}

TEST(CommMpiTrainingTest, ASignalToTheLauncherSavesACheckpointAndIsRecorded) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const zr::test::Scratch scratch;
    zr::test::Scene scene;
    zr::test::Job job(scene,
                      {zr::test::zeroth(), "launch", "--hosts", "localhost:2", "--", ZR_BUILD_DIR "/bin/quickstart",
                       ZR_SOURCE_DIR "/examples/quickstart/quickstart.toml", "train.steps=100000000", "job.threads=1",
                       "job.name=run", "job.runs=" + scratch.path("runs"), "communicator=mpi",
                       "checkpoint.dir=" + scratch.path("c"), "checkpoint.on_signal=save"},
                      {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}});
    const auto rows = [&] { return std::ifstream(scratch.path("runs/run/metrics.jsonl")).peek() != EOF; };
    ASSERT_TRUE(zr::test::eventually(rows, std::chrono::seconds(30))) << job.err();
    ::kill(job.pid(), signal);
    EXPECT_EQ(job.wait(), 0) << job.err();
    const auto summary = nlohmann::json::parse(std::ifstream(scratch.path("runs/run/summary.json")), nullptr, false);
    EXPECT_EQ(summary.at("stopped_by"), signal == SIGINT ? "SIGINT" : "SIGTERM");
    EXPECT_FALSE(std::filesystem::is_empty(scratch.path("c")));
  }
}

TEST(CommMpiTrainingTest, WarnsIfTheFileHasAnotherNumberOfRanksThanTheLauncher) {
  const zr::test::Scratch scratch;
  const std::string launch =
      "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; cd " + scratch.folder().string() +
      "; " ZR_BUILD_DIR "/bin/zeroth launch --hosts localhost:3 -- " ZR_BUILD_DIR "/bin/quickstart " ZR_SOURCE_DIR
      "/examples/quickstart/quickstart.toml train.steps=1 job.threads=1 job.ranks=";
  const auto other = shell(launch + "2");
  EXPECT_EQ(other.code, 0) << other.output;
  EXPECT_THAT(other.output, HasSubstr("zeroth: warning: command line: job.ranks is 2, but 3 ranks were started, so the "
                                      "job has 3 ranks; set job.ranks to that number, or let the launcher start 2\n"));
  EXPECT_EQ(other.output.find("warning", other.output.find("job.ranks is 2")), std::string::npos) << "once";
  const auto same = shell(launch + "3");
  EXPECT_EQ(same.code, 0) << same.output;
  EXPECT_EQ(same.output.find("job.ranks"), std::string::npos) << same.output;
}

TEST(CommMpiTrainingTest, NeedsRanksThatMpiHasStarted) {
  const zr::test::Scratch scratch;
  const auto done = shell("cd " + scratch.folder().string() +
                          " && " ZR_BUILD_DIR "/bin/zeroth launch -n 2 -- " ZR_BUILD_DIR
                          "/bin/quickstart " ZR_SOURCE_DIR "/examples/quickstart/quickstart.toml communicator=mpi");
  EXPECT_EQ(done.code, 3) << done.output;
  EXPECT_THAT(done.output, HasSubstr("communicator \"mpi\" needs ranks that MPI has started; start the program with "
                                     "mpirun, for example: mpirun --bind-to none -n 4 ./program job.toml"));
}

// The number of ranks on a host is what mpirun says.
TEST(CommMpiTrainingTest, NamesWhatInexactCollectivesNeed) {
  const zr::test::Scratch scratch;
  const std::string program =
      " " ZR_BUILD_DIR "/bin/quickstart " ZR_SOURCE_DIR
      "/examples/quickstart/quickstart.toml train.steps=2 job.threads=1 job.runs=runs job.ranks=2 ";
  const auto train = [&](const std::string& start, const std::string& keys) {
    return shell("cd " + scratch.folder().string() +
                 " && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; " + start + program + keys);
  };
  const std::string mpirun = "mpirun.openmpi --bind-to none --oversubscribe -n 2";
  const std::string on_two_nodes =
      mpirun + " -x ZR_STORE=127.0.0.1:" + std::to_string(20000 + ::getpid() % 10000) +
      " -x ZR_TOKEN=secret sh -c 'OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 exec \"$@\"' sh";
  const auto unsharded = train(on_two_nodes, "communicator=mpi strategy=zero1 communicator.weights=int8");
  EXPECT_EQ(unsharded.code, 2);
  EXPECT_THAT(
      unsharded.output,
      HasSubstr("communicator.weights = \"int8\" (command line): every rank has all weights under this job's "
                "strategy, so none are gathered for forward and backward; choose a strategy that shards weights of "
                "this model, or a smaller persistence_threshold of the strategy, or remove the key"));
  const auto several = train(on_two_nodes, "communicator=shm communicator.gradients=int4");
  EXPECT_EQ(several.code, 2);
  EXPECT_THAT(
      several.output,
      HasSubstr(
          "communicator.gradients = \"int4\" (command line): communicator 'shm', as it is configured, passes on "
          "exact values only; choose communicator = \"auto\" without keys in [communicator.shm], or remove the key"));
  const auto flat =
      train(on_two_nodes, "communicator=mpi communicator.mpi.hierarchy=false communicator.gradients=int8");
  EXPECT_EQ(flat.code, 2);
  EXPECT_THAT(
      flat.output,
      HasSubstr(
          "communicator.gradients = \"int8\" (command line): communicator 'mpi', as it is configured, passes on exact "
          "values only; choose communicator = \"auto\" without keys in [communicator.mpi], or remove the key"));
  EXPECT_THAT(flat.output, Not(HasSubstr("plan: "))) << "the error comes first";
  const auto rounded = train(mpirun, "communicator=mpi communicator.gradients=int8");
  EXPECT_EQ(rounded.code, 0) << rounded.output;
  EXPECT_THAT(rounded.output,
              HasSubstr("warning: communicator.gradients = \"int8\" (command line) has no effect, because all ranks "
                        "are on one host"));
  const auto one = train(ZR_BUILD_DIR "/bin/zeroth launch -n 2 --", "communicator=auto communicator.exact=false");
  EXPECT_EQ(one.code, 0) << one.output;
  EXPECT_THAT(
      one.output,
      HasSubstr("warning: communicator.exact = false (command line) has no effect, because all ranks are on one "
                "host"));
}

// Four ranks on two hosts. Without hierarchy, two of the three peers of a rank are on the other host, and each of its
// bytes passes to both. With hierarchy, a part of the weights passes once. Of the gradients, the second host gets the
// sum of two ranks, and the first one the elements of two. TCP and the start of the job add a little.
TEST(CommMpiHostsTest, TrainTheBitsOfOneHost) {
  const Hosts hosts(2);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  const zr::test::Scratch scratch;
  const std::string levels = " communicator.mpi.hierarchy_min_bytes=0", flat = " communicator.mpi.hierarchy=false";
  for (const std::string strategy : {"zero1", "zero3"}) {
    const std::string keys = "strategy=" + strategy + " job.ranks=4 ";
    const auto shm = summary_of(scratch, ZR_BUILD_DIR "/bin/zeroth launch -n 4 --", keys);
    for (const bool has_levels : {true, false}) {
      if (!has_levels && strategy == "zero3") continue;  // the same collectives
      const int64_t before = hosts.sent();
      const std::string start = has_levels == (strategy == "zero1") ? hosts.launch(2) : hosts.mpirun(2);
      const auto mpi = summary_of(scratch, start, keys + "communicator=auto" + (has_levels ? levels : flat));
      const int64_t sent = hosts.sent() - before;
      EXPECT_EQ(mpi.at("weights_hash"), shm.at("weights_hash")) << keys;
      const auto& bytes = mpi.at("communication_bytes");
      const int64_t reduced = bytes.at("reduce_scatter").get<int64_t>(),
                    gathered = bytes.at("all_gather").get<int64_t>();
      const bool shares =
          has_levels && strategy == "zero1";  // then the other host, not each rank, receives the weights
      const int64_t expected = has_levels ? reduced / 6 + gathered / (shares ? 2 : 6) : (reduced + gathered) / 3;
      EXPECT_GE(sent, expected) << keys << has_levels;
      EXPECT_LE(sent, expected * 11 / 10 + (256 << 10)) << keys << has_levels;
    }
  }
}

// Of 128 values, 132 or 72 bytes pass instead of 512: gradients to the other host as sums of its ranks, and their sums
// back, which zero0 gathers if there are several micro-steps, or weights. Headers of TCP and the start of the job add a
// little.
TEST(CommMpiHostsTest, SLOW_SendFewerBytesOfQuantizedGradientsAndWeights) {
  const Hosts hosts(2);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  const zr::test::Scratch scratch;
  constexpr double kInt8 = 132.0 / 512, kInt4 = 72.0 / 512;
  struct Job {
    std::string keys;
    double gradients, gathered;
  };
  for (const Job& job : {Job{"strategy=zero0 communicator.gradients=int8", kInt8, 1},
                         Job{"strategy=zero0 communicator.gradients=int4 train.gradient_accumulation=2", kInt4, kInt4},
                         Job{"strategy=zero1 communicator.gradients=int4", kInt4, 1},
                         Job{"strategy=zero1 communicator.exact=false", 1, 1},
                         Job{"strategy=zero3 strategy.zero3.persistence_threshold=0 communicator.gradients=int4 "
                             "communicator.weights=int8",
                             kInt4, kInt8}}) {
    const std::string keys = job.keys + " job.ranks=4 communicator=auto communicator.mpi.hierarchy_min_bytes=0";
    const int64_t before = hosts.sent();
    const auto summary = summary_of(scratch, hosts.launch(2), keys);
    const int64_t sent = hosts.sent() - before;
    const auto& bytes = summary.at("communication_bytes");
    // Each of four ranks receives 3/4 of the elements, but a host sends half of them. Under zero1 the ranks of a host
    // share weights, so the other half is received once.
    const double shares = job.keys.find("zero1") != std::string::npos ? 3 : 1;
    const double expected = (job.gradients * (bytes.value("all_reduce", 0.0) + bytes.value("reduce_scatter", 0.0)) +
                             shares * job.gathered * bytes.value("all_gather", 0.0)) /
                            6;
    EXPECT_GE(sent, expected) << keys;
    EXPECT_LE(sent, expected * 1.1 + (256 << 10)) << keys;
    const auto& memory = summary.at("memory").at("host").at("communicator");
    EXPECT_LE(memory.at("peak"), memory.at("planned")) << keys;
    RecordProperty(job.keys, std::to_string(sent));
  }
}

}  // namespace
