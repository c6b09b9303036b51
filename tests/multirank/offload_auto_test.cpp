// `auto` for activations, by what runs measured. What is found for everything else: unit/core/placement_test.cpp.
#include "multirank/checkpoint_fixture.hpp"

namespace zr::test {
namespace {

class OffloadAuto : public Checkpoints {
 protected:
  int64_t number(const std::string& job, const std::string& pointer) const {
    return summary(job).value(Json::json_pointer(pointer), int64_t{0});
  }
  // Bytes of a rank that are not activations.
  int64_t fixed(const std::string& job) const {
    int64_t bytes = 0;
    const Json device = summary(job).at("memory").at("device");
    for (const auto& [kind, one] : device.items())
      if (kind != "activations") bytes += one.at("peak").get<int64_t>();
    return bytes;
  }
  static std::string budget(int64_t bytes) { return " memory.device_budget=" + std::to_string(bytes) + "B "; }
};

TEST_F(OffloadAuto, KeepsActivationsOnTheDeviceWhereThoseMeasuredFit) {
  const std::string model = "strategy=zero2 parity.model=everything communicator.alias=false ";
  const std::string automatic = "offload.activations=auto offload.activation_bytes=256B ";
  run(2, "job.name=a\n", model);
  const std::string plain = hash("a");
  const int64_t all = number("a", "/memory/device/activations/peak");
  run(2, "job.name=a " + automatic + budget(fixed("a") + all + all / 8) + "\n", model);
  EXPECT_EQ(hash("a"), plain);
  EXPECT_EQ(number("a", "/memory/host/activations/peak"), 0) << "they fit";
  run(2, "job.name=a " + automatic + budget(fixed("a") + all - all / 8) + "\n", model);
  EXPECT_EQ(hash("a"), plain);
  EXPECT_GT(number("a", "/memory/host/activations/peak"), 0) << "an eighth of them has no room";
  // What a run on a tier measured, here and there, is what the device would need.
  run(2, "job.name=a " + automatic + budget(fixed("a") + 2 * all) + "\n", model);
  EXPECT_EQ(hash("a"), plain);
  EXPECT_EQ(number("a", "/memory/host/activations/peak"), 0) << "they fit again";
}

}  // namespace
}  // namespace zr::test
