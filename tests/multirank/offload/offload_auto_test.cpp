// Placement `auto` in jobs: states fill the tiers in order, activations are placed by the bytes that earlier runs
// measured. unit/core/plan/placement_test.cpp tests the placement itself.
#include "support/offload_test.hpp"

namespace zr::test {
namespace {

class OffloadAutoTest : public OffloadTest {
 protected:
  // Bytes per rank that are not activations.
  int64_t fixed(const std::string& job) const {
    int64_t bytes = 0;
    const Json device = summary(job).at("memory").at("device");
    for (const auto& [kind, one] : device.items())
      if (kind != "activations") bytes += one.at("peak").get<int64_t>();
    return bytes;
  }
  static std::string budget(int64_t bytes) { return " memory.device_budget=" + std::to_string(bytes) + "B "; }
};

TEST_F(OffloadAutoTest, FillsTheDeviceThenHostThenDisk) {
  const std::string model = "strategy=zero2 parity.model=large communicator.share_weights=false";
  run(2, "job.name=a\n", model);  // measures the activations
  const std::string plain_hash = hash("a");
  const Json plain = summary("a").at("memory").at("device");
  int64_t device = 16 << 10;
  for (const auto& [kind, bytes] : plain.items())
    if (kind != "optimizer") device += bytes.at("peak").get<int64_t>();
  const int64_t all = plain.at("optimizer").at("peak");
  const std::string tiers = " offload.nvme.path=" + scratch_.path("swap") +
                            " offload.nvme.block_bytes=4KiB offload.nvme.depth=1 offload.optimizer=auto "
                            "memory.device_budget=" +
                            std::to_string(device + all / 3) + "B";
  const int64_t communicator = number("a", "/memory/host/communicator/peak");
  run(2,
      "job.name=a memory.host_budget=" + std::to_string(2 * (communicator + (40 << 10) + all / 3)) + "B" + tiers + "\n",
      model);
  EXPECT_EQ(hash("a"), plain_hash);
  for (const char* tier : {"device", "host", "disk"}) {
    const int64_t part = number("a", "/memory/" + std::string(tier) + "/optimizer/peak");
    EXPECT_GT(part, all / 8) << tier;
    EXPECT_LT(part, all * 2 / 3) << tier;
  }
}

TEST_F(OffloadAutoTest, FillsTiersInTheConfiguredOrder) {
  const std::string budget =
      " strategy=zero2 parity.model=large offload.optimizer=auto memory.device_budget=" + std::to_string(860 << 10) +
      "B offload.nvme.path=" + scratch_.path("swap") + " offload.tiers=";
  run(2, "job.name=a" + budget + "\"cpu\"\njob.name=b" + budget + "\"nvme\"\n");
  EXPECT_GT(number("a", "/memory/host/optimizer/peak"), 0);
  EXPECT_EQ(number("a", "/memory/disk/optimizer/peak"), 0);
  EXPECT_EQ(number("b", "/memory/host/optimizer/peak"), 0);
  EXPECT_GT(number("b", "/memory/disk/optimizer/peak"), 0);
  EXPECT_EQ(hash("a"), hash("b"));
}

TEST_F(OffloadAutoTest, KeepsActivationsOnTheDeviceWhenTheyFit) {
  const std::string model = "strategy=zero2 parity.model=everything communicator.share_weights=false ";
  const std::string automatic = "offload.activations=auto offload.activation_bytes=256B ";
  run(2, "job.name=a\n", model);
  const std::string plain = hash("a");
  const int64_t all = number("a", "/memory/device/activations/peak");
  run(2, "job.name=a " + automatic + budget(fixed("a") + all + all / 8) + "\n", model);
  EXPECT_EQ(hash("a"), plain);
  EXPECT_EQ(number("a", "/memory/host/activations/peak"), 0) << "they fit";
  run(2, "job.name=a " + automatic + budget(fixed("a") + all - all / 8) + "\n", model);
  EXPECT_EQ(hash("a"), plain);
  EXPECT_GT(number("a", "/memory/host/activations/peak"), 0) << "an eighth of them does not fit";
  // A run with offloaded activations measures them on all tiers; their total is what the device would need.
  run(2, "job.name=a " + automatic + budget(fixed("a") + 2 * all) + "\n", model);
  EXPECT_EQ(hash("a"), plain);
  EXPECT_EQ(number("a", "/memory/host/activations/peak"), 0) << "they fit again";
}

}  // namespace
}  // namespace zr::test
