// Shared by the tests of tiers: where the state of a job is stored, and what its summary reports.
#pragma once

#include <gmock/gmock.h>

#include "support/checkpoint_test.hpp"

namespace zr::test {

/// Jobs whose state is on tiers.
class OffloadTest : public CheckpointTest {
 protected:
  OffloadTest() { fs::create_directories(scratch_.path("swap")); }
  // Blocks of the size of one norm block, so that a small model has many tiles.
  std::string disk() const {
    return " offload.optimizer=nvme offload.nvme.path=" + scratch_.path("swap") +
           " offload.nvme.block_bytes=4KiB offload.nvme.depth=1 ";
  }
  // One job, which must succeed.
  void train(int ranks, const RankBody& body, const std::string& name, const std::string& how) {
    const Outcome done = shell(launch(ranks, body, how + " job.name=" + name));
    ASSERT_EQ(done.code, 0) << name << ": " << how << done.output;
  }
  // Optimizer states on a tier; a disk has blocks as above.
  std::string states(const std::string& tier) const {
    return tier == "cpu" ? " offload.optimizer=cpu " : disk() + "offload.optimizer=" + tier + " ";
  }
  // The tier that fails on demand (ZR_TIER_FAULT).
  static constexpr const char* kFailing = ZR_BUILD_DIR "/tests/plugins/failing/zr_offload_nvme.so ";
  static constexpr const char* kMemory = " offload.optimizer=cpu offload.gradients=cpu ";
  static constexpr const char* kDiskBacked = "offload.gradients=nvme offload.parameters=nvme ";
  const std::string kGathered =
      "strategy=zero3 communicator.share_weights=false strategy.zero3.persistence_threshold=100 ";
  int64_t number(const std::string& job, const std::string& pointer) const {
    return summary(job).value(Json::json_pointer(pointer), int64_t{0});
  }
};

}  // namespace zr::test
