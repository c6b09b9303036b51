// Training on a device over "mpi", which moves memory of the device through host memory: the bits of "shm".
#include <gmock/gmock.h>

#include "multirank/model/device_engine_test.hpp"

namespace {

using namespace engine_tests;

RANK_BODY(trains_on_pretended_hosts, Run) {
  run.build();
  run.train();
  print_result(run);
}

class DeviceHostsTest : public DeviceEngineTest {
 protected:
  // The losses of all steps, and the line of rank 0 with the hash of the weights. start: a launcher's command.
  std::string trained(const std::string& start, const std::string& keys) {
    const auto done = shell("export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; " + start + " " +
                            program(4, trains_on_pretended_hosts,
                                    "parity.model=everything train.steps=3 train.gradient_accumulation=2 job.threads=1 "
                                    "strategy=" +
                                        keys + kDevice));
    EXPECT_EQ(done.code, 0) << keys << done.output;
    std::ostringstream text;
    for (const Json& row : metrics()) text << row.at("loss") << " ";
    for (const std::string& line : done.lines())
      if (line.find("result ") != line.npos) text << line;
    EXPECT_THAT(done.output, testing::HasSubstr("optimizer states are in memory of the device")) << keys;
    return text.str();
  }
};

TEST_F(DeviceHostsTest, SLOW_MpiHasTheBitsOfShmUnderEveryStrategy) {
  for (const std::string strategy : {"zero0", "zero1 train.gradient_clipping=0.1", "zero2 train.dtype=bf16",
                                     "zero3 strategy.zero3.persistence_threshold=0 train.dtype=bf16"}) {
    const std::string shm = trained(ZR_BUILD_DIR "/bin/zeroth launch -n 4 --", strategy + " communicator=shm");
    EXPECT_THAT(shm, testing::HasSubstr("result "));
    EXPECT_EQ(trained("mpirun.openmpi --bind-to none --oversubscribe -n 4 "
                      "sh -c 'ZR_HOST_ID=$((OMPI_COMM_WORLD_RANK / 2)) exec \"$@\"' sh",
                      strategy + " communicator=mpi communicator.mpi.hierarchy_min_bytes=0"),
              shm)
        << strategy;
  }
}

}  // namespace
