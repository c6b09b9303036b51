// The memory of a job with state on tiers: planned, measured, and at the end of an engine.
#include <gmock/gmock.h>

#include <cstdlib>
#include <fstream>

#include "support/launch_job.hpp"
#include "support/offload_test.hpp"
#include "support/sanitizers.hpp"

namespace zr::test {
namespace {

using ::testing::HasSubstr;

TEST_F(OffloadTest, DiskBackedBuffersMatchThePlan) {
  run(2, "job.name=plain\njob.name=disk" + disk() + kDiskBacked + "\n",
      kGathered + "train.dtype=bf16 parity.model=large strategy.zero3.bucket_bytes=64KiB");
  const Json memory = summary("disk").at("memory");
  for (const auto& [tier, kinds] : memory.items())
    for (const auto& [kind, bytes] : kinds.items()) {
      if (kind == "activations" || kind == "other" || kind == "communicator") continue;
      EXPECT_EQ(bytes.at("planned"), bytes.at("peak")) << kind << " on " << tier;
    }
  for (const std::string kind : {"weights", "gradients"}) {
    const std::string peak = "/" + kind + "/peak";
    EXPECT_GT(number("disk", "/memory/disk" + peak), 0) << kind;
    EXPECT_EQ(number("disk", "/memory/disk" + peak) + number("disk", "/memory/device" + peak),
              number("plain", "/memory/device" + peak))
        << kind;
  }
}

// Bytes of this process by field of /proc/self/status: "VmRSS", "VmHWM".
int64_t held(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind(field + ":", 0) == 0) return std::atoll(line.c_str() + field.size() + 1) * 1024;
  return -1;
}

// When the engine ends, the model allocates memory for its weights: no more than the engine has freed.
RANK_BODY(ends, engine_tests::Run) {
  run.build();
  run.train();
  int64_t weights = 0;
  for (const auto& parameter : run.model->parameters()) weights += static_cast<int64_t>(parameter.nbytes());
  std::ofstream("/proc/self/clear_refs") << 5;  // resets the peak
  const int64_t before = held("VmRSS");
  EXPECT_LT(held("VmHWM"), before + weights / 8) << "the kernel resets the peak of this process";
  run.engine.reset();
  const int64_t more = held("VmHWM") - before;
  std::cout << "destroying the engine took " << more << " more bytes; the weights take " << weights << std::endl;
  EXPECT_LT(more, weights / 4) << "destroying the engine needs no more memory than training";
}

TEST_F(OffloadTest, EndsWithoutMoreMemoryThanTraining) {
  if (kSanitized) GTEST_SKIP() << kSanitizerMemory;
  const Outcome ended =
      shell(launch(1, ends,
                   "strategy=zero2 parity.model=ample train.steps=1 offload.optimizer=nvme offload.nvme.path=" +
                       scratch_.path("swap")));
  EXPECT_EQ(ended.code, 0) << ended.output;
}

TEST_F(OffloadTest, EveryTierMatchesThePlan) {
  run(2, "job.name=plain\njob.name=cpu" + std::string(kMemory) + "\njob.name=nvme" + disk() + "\n",
      "strategy=zero2 train.dtype=bf16");
  for (const std::string name : {"cpu", "nvme"}) {
    const Json memory = summary(name).at("memory");
    for (const auto& [tier, kinds] : memory.items())
      for (const auto& [kind, bytes] : kinds.items()) {
        if (kind == "activations" || kind == "other" || kind == "communicator") continue;
        EXPECT_EQ(bytes.at("planned"), bytes.at("peak")) << name << ": " << kind << " on " << tier;
      }
  }
  const int64_t master = number("plain", "/memory/device/master/peak"),
                slots = number("plain", "/memory/device/optimizer/peak");
  EXPECT_EQ(number("cpu", "/memory/host/master/peak"), master);
  EXPECT_EQ(number("cpu", "/memory/host/optimizer/peak"), slots);
  EXPECT_EQ(number("cpu", "/memory/host/gradients/peak") + number("cpu", "/memory/device/gradients/peak"),
            number("plain", "/memory/device/gradients/peak"));
  EXPECT_FALSE(summary("cpu").at("memory").at("device").contains("optimizer"));
  EXPECT_GT(number("nvme", "/memory/host/other/peak"), 0) << "checksums";
  EXPECT_EQ(number("nvme", "/memory/host/other/planned"), number("nvme", "/memory/host/other/peak"));
  EXPECT_EQ(number("nvme", "/memory/disk/master/peak"), master);
  EXPECT_EQ(number("nvme", "/memory/disk/optimizer/peak"), slots);
  EXPECT_FALSE(summary("nvme").at("memory").at("device").contains("master"));
}

TEST_F(OffloadTest, RejectsAPlanOverTheHostBudget) {
  const Outcome rejected =
      shell(launch(2, engine_tests::trains, "strategy=zero2 offload.optimizer=cpu memory.host_budget=64KiB"));
  EXPECT_EQ(rejected.code, 2) << rejected.output;
  EXPECT_THAT(rejected.output, HasSubstr("memory.host_budget is 64.00 KiB (command line), but the plan takes "));
  EXPECT_THAT(rejected.output, HasSubstr("exp_avg on cpu"));
  EXPECT_THAT(rejected.output, HasSubstr("host memory    communicator"));
  EXPECT_THAT(rejected.output, HasSubstr("raise memory.host_budget, or start fewer ranks on this node, because the "
                                         "communicator of each rank takes memory"));
}

// Total bytes of the processes as the kernel counts them: shared memory counts once.
int64_t held_by(const std::vector<pid_t>& processes) {
  int64_t bytes = 0;
  for (const pid_t pid : processes) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/smaps_rollup");
    for (std::string line; std::getline(file, line);)
      if (line.rfind("Pss:", 0) == 0) bytes += std::stoll(line.substr(4)) << 10;
  }
  return bytes;
}

// Sharded weights under budgets that the model exceeds without a tier; tests/bench/offload/headline.sh trains models of
// these blocks under zero2 without budgets.
TEST_F(OffloadTest, SLOW_Trains350MillionParametersIn3GiB) {
  if (kSanitized) GTEST_SKIP() << kSanitizerMemory;
  const std::string job = zeroth_bin() +
                          "train " ZR_SOURCE_DIR
                          "/examples/gpt/gpt.toml strategy=zero3 train.dtype=bf16 model.width=1024 model.layers=28 "
                          "model.heads=16 model.context=32 model.recompute=true train.micro_batch=1 train.steps=2 "
                          "job.ranks=2 schedule.use=constant optimizer.lr=3e-6 eval.every=0 sample.length=0 "
                          "job.name=large memory.device_budget=1300MiB memory.host_budget=200MiB ";
  const Outcome rejected = shell(job);
  EXPECT_EQ(rejected.code, 2) << rejected.output;
  EXPECT_THAT(rejected.output, HasSubstr("memory.device_budget is 1.27 GiB"));
  Scene scene;
  Job done(scene, {"sh", "-c",
                   "cd " + scratch_.folder().string() + " && exec " + job +
                       "offload.optimizer=nvme offload.nvme.path=" + scratch_.path("swap")});
  int64_t most = 0;
  const auto end = Clock::now() + std::chrono::minutes(25);  // before ctest's limit, so that a hang shows the output
  for (; !gone(done.pid()) && Clock::now() < end; std::this_thread::sleep_for(milliseconds(50)))
    most = std::max(most, held_by(ranks_of(done.pid())));
  ASSERT_EQ(done.wait(milliseconds(1000)), 0) << done.out() << done.err();
  EXPECT_GT(most, int64_t{2} << 30) << "both ranks were measured";
  EXPECT_LT(most, int64_t{3} << 30);
  const std::map<int64_t, std::string> each = losses("large");
  ASSERT_EQ(each.size(), 2u);
  EXPECT_LT(std::stod(each.at(2)), std::stod(each.at(1)));
  EXPECT_EQ(number("large", "/memory/disk/optimizer/peak"), number("large", "/memory/disk/optimizer/planned"));
  EXPECT_GT(number("large", "/memory/disk/optimizer/peak") >> 20, 1300);
}

}  // namespace
}  // namespace zr::test
