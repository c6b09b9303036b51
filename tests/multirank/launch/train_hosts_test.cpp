// `zeroth train` and `zeroth launch` with --hosts on two hosts of this machine (network_hosts.sh) with different
// numbers of ranks: where the ranks run, and that they train the bits of one host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "simulators/network_hosts.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"
#include "support/text_of.hpp"

namespace {

using testing::ElementsAre;
using zr::testing::Hosts;
using zr::testing::shell;

class ZerothHostsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!hosts_.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts_.unavailable();
    // The program of the job, whose ranks record where they run.
    scratch_.write("ranks_of_hosts.sh",
                   "#!/bin/sh\n[ -z \"$OMPI_COMM_WORLD_RANK\" ] || echo $OMPI_COMM_WORLD_RANK $(hostname) >> " +
                       scratch_.path("ranks") + "\nexec " ZR_BUILD_DIR "/bin/quickstart \"$@\"\n");
    std::filesystem::permissions(program(), std::filesystem::perms::owner_all);
  }

  std::string first() const { return hosts_.name(0); }
  std::string second() const { return hosts_.name(1); }
  std::string program() const { return scratch_.path("ranks_of_hosts.sh"); }
  std::string job() const {
    return " " ZR_SOURCE_DIR
           "/examples/quickstart/quickstart.toml train.steps=20 job.threads=1 job.ranks=4 job.name=run job.runs=runs "
           "communicator=auto ";
  }
  // Runs the command, and returns the hash of the weights that it has trained.
  nlohmann::json trained(const std::string& command) const {
    std::filesystem::remove_all(scratch_.path("runs"));
    const auto done = shell("cd " + scratch_.folder().string() +
                            " && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; " + command);
    EXPECT_EQ(done.code, 0) << command << done.output;
    const auto summary = nlohmann::json::parse(std::ifstream(scratch_.path("runs/run/summary.json")), nullptr, false);
    return summary.is_object() ? summary.value("weights_hash", nlohmann::json()) : nlohmann::json();
  }
  void expect_trains_the_bits_of_one_host(const std::string& command) const {
    const nlohmann::json weights = trained(command);
    std::vector<std::string> ranks = shell("cat " + scratch_.path("ranks")).lines();
    std::sort(ranks.begin(), ranks.end());
    EXPECT_THAT(ranks, ElementsAre("0 " + first(), "1 " + second(), "2 " + second(), "3 " + second()));
    EXPECT_TRUE(weights.is_string());
    EXPECT_EQ(weights, trained(ZR_BUILD_DIR "/bin/zeroth launch -n 4 -- " ZR_BUILD_DIR "/bin/quickstart" + job()));
  }

  const Hosts hosts_{2};
  const zr::test::Scratch scratch_;
};

TEST_F(ZerothHostsTest, SLOW_TrainHasOneRankOnAHostWithoutANumber) {
  expect_trains_the_bits_of_one_host(hosts_.zeroth() + " train --hosts " + first() + "," + second() + ":3" + job() +
                                     "job.program=" + program());
}

TEST_F(ZerothHostsTest, SLOW_LaunchReadsAFileOfHosts) {
  const std::string file =
      scratch_.write("hosts", "# of this job\n" + first() + "\n\n" + second() + " slots=3  # as in OpenMPI's files\n");
  expect_trains_the_bits_of_one_host(hosts_.zeroth() + " launch --hosts @" + file + " -- " + program() + job());
}

}  // namespace
