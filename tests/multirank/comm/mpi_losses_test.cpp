// Training of a GPT over comm_mpi: every loss, and the weights, have the bits of comm_shm.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "simulators/network_hosts.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using zr::testing::Hosts;
using zr::testing::Outcome;
using zr::testing::shell;

constexpr int kSteps = 8;
const std::string kLaunch = ZR_BUILD_DIR "/bin/zeroth launch -n ", kGpt = " " ZR_BUILD_DIR "/bin/gpt",
                  kTrain = " " ZR_BUILD_DIR "/bin/zeroth train";

// What a job has left in its run folder.
struct Trained {
  std::vector<double> losses;
  std::string weights_hash;
  bool operator==(const Trained&) const = default;
};

void PrintTo(const Trained& trained, std::ostream* out) {
  for (const double loss : trained.losses) *out << loss << " ";
  *out << trained.weights_hash;
}

class CommMpiLossesTest : public testing::Test {
 protected:
  // command: without the TOML file.
  Trained train(const std::string& command, const std::string& keys) {
    last_ = shell("cd " + scratch_.folder().string() +
                  " && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; " + command +
                  " " ZR_SOURCE_DIR
                  "/examples/gpt/gpt.toml model.layers=2 model.width=192 model.context=16 train.micro_batch=1 "
                  "sample.length=0 eval.every=0 job.threads=1 job.name=run job.runs=runs train.steps=" +
                  std::to_string(kSteps) + " " + keys);
    EXPECT_EQ(last_.code, 0) << command << " " << keys << last_.output;
    std::ifstream rows(scratch_.path("runs/run/metrics.jsonl"));
    Trained trained;
    for (std::string row; std::getline(rows, row);) trained.losses.push_back(nlohmann::json::parse(row).at("loss"));
    const auto summary = nlohmann::json::parse(std::ifstream(scratch_.path("runs/run/summary.json")), nullptr, false);
    if (summary.is_object()) trained.weights_hash = summary.at("weights_hash");
    EXPECT_EQ(trained.losses.size(), kSteps) << command;
    shell("rm -r " + scratch_.path("runs"));
    return trained;
  }
  // Lines of the last job that begin with this text.
  int lines_with(const std::string& begin) const {
    const auto lines = last_.lines();
    return static_cast<int>(
        std::count_if(lines.begin(), lines.end(), [&](const std::string& line) { return line.starts_with(begin); }));
  }
  const zr::test::Scratch scratch_;
  Outcome last_;
};

TEST_F(CommMpiLossesTest, SLOW_EightRanksOnTwoPretendedHostsHaveTheBitsOfOneHost) {
  const std::string keys = "strategy=zero2 train.dtype=bf16 job.ranks=8 ";
  EXPECT_EQ(train("mpirun.openmpi --bind-to none --oversubscribe -n 8 "
                  "sh -c 'ZR_HOST_ID=$((OMPI_COMM_WORLD_RANK / 4)) exec \"$@\"' sh" +
                      kGpt,
                  keys + "communicator=mpi communicator.mpi.hierarchy_min_bytes=0"),
            train(kLaunch + "8 --" + kGpt, keys));
}

// Without job.ranks the file has 2 ranks, and 4 are started.
class ZerothTrainUnderMpirunTest : public CommMpiLossesTest {
 protected:
  void expect_one_job() {
    EXPECT_EQ(lines_with("plan: zero1 + adamw: 942336 parameters, fp32, 4 ranks"), 1) << last_.output;
    EXPECT_EQ(lines_with("plan: "), 1) << last_.output;
    EXPECT_EQ(lines_with("step " + std::to_string(kSteps) + "/" + std::to_string(kSteps)), 1) << last_.output;
  }
};

TEST_F(ZerothTrainUnderMpirunTest, SLOW_RanksOfMpirunAreTheRanksOfTheJob) {
  const Trained shm = train(kTrain, "job.ranks=4");
  expect_one_job();
  for (const std::string communicator : {"shm", "mpi"}) {
    EXPECT_EQ(train("mpirun.openmpi --bind-to none --oversubscribe -n 4" + kTrain, "communicator=" + communicator), shm)
        << communicator;
    expect_one_job();
    EXPECT_EQ(lines_with("zeroth: warning: "), 1) << last_.output;
    EXPECT_NE(last_.output.find("job.ranks is 2, but 4 ranks were started, so the job has 4 ranks"), std::string::npos)
        << last_.output;
  }
}

TEST_F(ZerothTrainUnderMpirunTest, SLOW_TrainsOnTheHostsOfAHostfile) {
  const Hosts hosts(2);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  const std::string file = scratch_.write("hostfile", hosts.name(0) + " slots=2\n" + hosts.name(1) + " slots=2\n");
  EXPECT_EQ(train(hosts.mpirun("--hostfile " + file) + kTrain, "communicator=auto job.ranks=4"),
            train(kTrain, "job.ranks=4"));
}

// Then `zeroth train` starts the ranks, which are not the process that mpirun knows. mpirun gives it a terminal.
TEST_F(ZerothTrainUnderMpirunTest, SLOW_OneProcessStartsTheRanksItself) {
  const std::string mpirun = "mpirun.openmpi --bind-to none -n 1" + kTrain;
  const Trained shm = train(kTrain, "job.ranks=2");
  EXPECT_EQ(train(mpirun, "job.ranks=2"), shm);
  EXPECT_EQ(lines_with("step " + std::to_string(kSteps) + "/" + std::to_string(kSteps)), 1) << last_.output;
  EXPECT_EQ(last_.output.find('\x1b'), std::string::npos) << "no progress bar: " << last_.output;
  EXPECT_EQ(train(mpirun + " --hosts localhost:2", "job.ranks=2 communicator=mpi"), shm);
  last_ = shell("export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; cd " + scratch_.folder().string() +
                "; " + mpirun + " " ZR_SOURCE_DIR "/examples/gpt/gpt.toml job.ranks=2 communicator=mpi");
  EXPECT_NE(last_.code, 0);
  EXPECT_NE(last_.output.find("communicator \"mpi\" needs ranks that MPI has started; "), std::string::npos)
      << last_.output;
}

TEST_F(ZerothTrainUnderMpirunTest, SLOW_ErrorsAreThoseOfTheProgramAndOfTheCommand) {
  const auto failed = [&](const std::string& options) {
    return shell(
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; mpirun.openmpi --bind-to none "
        "--oversubscribe -n 2" +
        kTrain + options);
  };
  const std::string file = " " ZR_SOURCE_DIR "/examples/gpt/gpt.toml ";
  for (const auto& [options, says] :
       {std::pair<std::string, std::string>{file + "model.layerss=3",
                                            "command line: unknown key 'model.layerss'; did you mean 'model.layers'?"},
        {file + "job.program=missing", "job.program 'missing' was not found: searched "},
        {"", "zeroth train: no TOML file is given"},
        {" --hosts localhost:2" + file,
         "zeroth train: --hosts localhost:2 starts the ranks, but mpirun has started this process as one of several "
         "ranks; remove --hosts, or start one `zeroth train` without mpirun"}}) {
    const Outcome done = failed(options);
    EXPECT_EQ(done.code, 2) << options;
    EXPECT_NE(done.output.find(says), std::string::npos) << done.output;
  }
}

struct Link {
  const char* name;
  int hosts, ranks_per_host;
  const char* rate;
  int delay_us;  // one way
};

class CommMpiLinksTest : public CommMpiLossesTest, public testing::WithParamInterface<Link> {};

TEST_P(CommMpiLinksTest, JobsHaveTheBitsOfOneHost) {
  const Link& link = GetParam();
  const Hosts hosts(link.hosts);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  hosts.limit_rate(link.rate);
  hosts.delay(link.delay_us);
  for (const std::string strategy : {"zero1", "zero3 train.dtype=bf16"}) {
    const std::string keys = "strategy=" + strategy + " job.ranks=4 ";
    EXPECT_EQ(train(hosts.launch(link.ranks_per_host) + kGpt, keys + "communicator=auto"),
              train(kLaunch + "4 --" + kGpt, keys))
        << strategy;
  }
}

INSTANTIATE_TEST_SUITE_P(SLOW_Links, CommMpiLinksTest,
                         testing::Values(Link{"OneGbitAnd200Us", 2, 2, "1gbit", 200},
                                         Link{"OneGbitAnd5Ms", 2, 2, "1gbit", 5000},
                                         Link{"TenGbitAnd200Us", 2, 2, "10gbit", 200},
                                         Link{"OneGbitAnd5MsBetweenFourHosts", 4, 1, "1gbit", 5000}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
