// Checkpoints of training state on the device: host memory has a part of it at a time, except with checkpoint.async.
#include <functional>

#include "multirank/model/device_engine_test.hpp"
#include "support/sanitizers.hpp"

namespace {

using namespace engine_tests;

constexpr int64_t kWide = 4096, kTensorBytes = kWide * kWide * 4;  // of the weight, and of each of its two states

int64_t own_kib(const std::string& name) {
  std::ifstream in("/proc/self/status");
  for (std::string word; in >> word;)
    if (int64_t kib = 0; word == name + ":" && in >> kib) return kib;
  ADD_FAILURE() << "/proc/self/status has no " << name;
  return 0;
}

// The bytes by which this process's memory grows at most while fn runs.
int64_t peak_growth(const std::function<void()>& fn) {
  EXPECT_TRUE(std::ofstream("/proc/self/clear_refs") << 5 << std::flush);  // resets VmHWM
  const int64_t before = own_kib("VmRSS");
  fn();
  return (own_kib("VmHWM") - before) * 1024;
}

// The first save and the first load also touch memory of the simulated device, and fill buffers that stay.
RANK_BODY(saves_and_loads_a_large_layer, Run) {
  torch::nn::Linear layer(torch::nn::LinearOptions(kWide, kWide).bias(false));
  zr::Engine engine(run.program, *layer);
  const std::string folder = std::getenv("SAVE_INTO");
  const torch::Tensor x = torch::ones({1, kWide}).to(engine.device());
  const auto step = [&] {
    engine.backward(layer->forward(x).square().mean());
    engine.step();
  };
  step();
  engine.save(folder);
  step();
  const int64_t saved = peak_growth([&] { engine.save(folder); });
  step();
  const std::string last = folder + "/step-00000002";
  engine.load(last);
  const std::string hash = engine.weights_hash();
  const int64_t loaded = peak_growth([&] { engine.load(last); });
  EXPECT_EQ(engine.weights_hash(), hash);
  if (zr::test::kSanitized) return;
  EXPECT_LT(saved, kTensorBytes / 2);
  EXPECT_LT(loaded, kTensorBytes * 3 / 4);
}

class DeviceSaveTest : public DeviceEngineTest {
 protected:
  // The row of summary.json for a kind of host memory: planned bytes and peak; zeros without a row.
  std::pair<int64_t, int64_t> host_memory(const std::string& kind) const {
    const Json memory = summary()["memory"];
    if (!memory.contains("host") || !memory["host"].contains(kind)) return {};
    return {memory["host"][kind]["planned"], memory["host"][kind]["peak"]};
  }
  void save_and_load(const std::string& overrides) {
    const std::string dir = (folder_ / "saved").string();
    const auto done =
        launch(1,
               program(1, saves_and_loads_a_large_layer,
                       "strategy=zero2 train.steps=4 job.threads=1 checkpoint.dir=" + dir + " " + overrides + kDevice),
               "SAVE_INTO=" + dir);
    EXPECT_EQ(done.code, 0) << done.output;
    EXPECT_NE(done.output.find("are in memory of the device"), std::string::npos) << done.output;
  }
};

TEST_F(DeviceSaveTest, HostMemoryHasAPartOfTheState) {
  save_and_load("");
  constexpr std::pair<int64_t, int64_t> kChunk{4 << 20, 4 << 20};
  EXPECT_EQ(host_memory("staging"), kChunk);
  EXPECT_EQ(host_memory("snapshot").second, 0);
}

TEST_F(DeviceSaveTest, AnAsynchronousSaveHasOneCopy) {
  save_and_load("checkpoint.async=true");
  EXPECT_EQ(host_memory("staging").second, 0);
  const auto [planned, peak] = host_memory("snapshot");
  EXPECT_EQ(planned, peak);
  EXPECT_EQ(planned, 3 * kTensorBytes);
}

// `zeroth plan` prints the memory that a save takes.
TEST_F(DeviceSaveTest, IsPlanned) {
  const std::string plan = ZR_BUILD_DIR
      "/bin/zeroth plan --params 1e6 -n 1 job.device=sim checkpoint.dir=c strategy=zero2 | grep 'host memory'";
  EXPECT_EQ(shell(plan).output,
            "  host memory    communicator                                                  64.00 KiB\n"
            "  host memory    a part of a checkpoint                                         4.00 MiB\n");
}

}  // namespace
