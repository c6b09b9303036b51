// Training state on tiers through the public API: results, bytes, time, and the files that remain.
#include "support/offload_test.hpp"

#include <gmock/gmock.h>

#include <array>
#include <set>

#include "support/launch_job.hpp"

namespace zr::test {
namespace {

using ::testing::ElementsAre;

using ::testing::EndsWith;

using ::testing::HasSubstr;

using ::testing::StartsWith;

TEST_F(OffloadTest, ResumesFromACheckpointOfAnyOtherPlacement) {
  const std::vector<std::string> placements{" ", kMemory, disk(),
                                            disk() + "offload.device_fraction=0.4 offload.gradients=cpu"};
  const std::string model = "strategy=zero2 parity.model=everything train.dtype=bf16 ";
  run(2, "job.name=uninterrupted\n", model);
  std::string first, then;
  for (std::size_t i = 0; i < placements.size(); ++i)
    first += "job.name=a" + std::to_string(i) + " train.steps=2 checkpoint.dir=c" + std::to_string(i) +
             " checkpoint.every=2 checkpoint.async=" + (i % 2 ? "true" : "false") + placements[i] + "\n";
  run(2, first, model);
  for (std::size_t i = 0; i < placements.size(); ++i) {
    EXPECT_TRUE(contents(scratch_.path("c" + std::to_string(i) + "/step-00000002")) ==
                contents(scratch_.path("c0/step-00000002")))
        << placements[i] << " saves the same bytes as the device";
    for (std::size_t j = 0; j < placements.size(); ++j)
      then += "job.name=b" + std::to_string(i) + std::to_string(j) + " checkpoint.resume=true checkpoint.dir=c" +
              std::to_string(i) + placements[j] + "\n";
  }
  run(2, then, model);
  for (std::size_t i = 0; i < placements.size(); ++i)
    for (std::size_t j = 0; j < placements.size(); ++j) {
      const std::string name = "b" + std::to_string(i) + std::to_string(j);
      EXPECT_EQ(hash(name), hash("uninterrupted")) << placements[i] << " then " << placements[j];
      EXPECT_EQ(losses(name).at(4), losses("uninterrupted").at(4));
    }
}

TEST_F(OffloadTest, SLOW_ResumesFromACheckpointWithWeightsAndGradientsOnDisk) {
  const std::vector<std::string> placements{" ", disk() + kDiskBacked,
                                            disk() + kDiskBacked + "offload.optimizer=device",
                                            disk() + "offload.parameters=cpu offload.gradients=nvme"};
  for (const std::string dtype : {"fp32", "bf16"}) {
    const std::string model = kGathered + "parity.model=everything train.dtype=" + dtype,
                      uninterrupted = "uninterrupted" + dtype;
    run(2, "job.name=" + uninterrupted + "\n", model);
    std::string first, then;
    for (std::size_t i = 0; i < placements.size(); ++i)
      first += "job.name=a" + dtype + std::to_string(i) + " train.steps=2 checkpoint.dir=" + dtype + std::to_string(i) +
               " checkpoint.every=2 checkpoint.async=" + (i % 2 ? "true" : "false") + placements[i] + "\n";
    run(2, first, model);
    for (std::size_t i = 0; i < placements.size(); ++i) {
      EXPECT_TRUE(contents(scratch_.path(dtype + std::to_string(i) + "/step-00000002")) ==
                  contents(scratch_.path(dtype + "0/step-00000002")))
          << placements[i] << " saves the same bytes as the device";
      for (const std::size_t j : {i, (i + 1) % placements.size()})
        then += "job.name=b" + dtype + std::to_string(i) + std::to_string(j) + " checkpoint.resume=true" +
                " checkpoint.dir=" + dtype + std::to_string(i) + placements[j] + "\n";
    }
    run(2, then, model);
    for (std::size_t i = 0; i < placements.size(); ++i)
      for (const std::size_t j : {i, (i + 1) % placements.size()}) {
        const std::string name = "b" + dtype + std::to_string(i) + std::to_string(j);
        EXPECT_EQ(hash(name), hash(uninterrupted)) << placements[i] << " then " << placements[j];
        EXPECT_EQ(losses(name).at(4), losses(uninterrupted).at(4));
      }
  }
}

// Every micro-step except the first reads the reduced gradients to add to them; the optimizer reads them once. Every
// micro-step writes them. A block where two ranges meet stays in memory. A range that was read ahead is read again if
// its memory was needed in between, which depends on the disk.
TEST_F(OffloadTest, WritesReducedGradientsOncePerMicroStepAndReadsThemBack) {
  std::string jobs;
  for (const std::string steps : {"2", "3"})
    for (const std::string micro_steps : {"1", "2", "5"})
      jobs += "job.name=s" + steps + "a" + micro_steps + " train.steps=" + steps +
              " train.gradient_accumulation=" + micro_steps + disk() +
              "offload.optimizer=device offload.gradients=nvme\n";
  run(2, jobs, "strategy=zero2 strategy.zero2.bucket_bytes=64KiB parity.model=large");
  const auto moved = [&](const std::string& micro_steps, const std::string& way) {
    const std::string bytes = "/tiers/nvme/" + way + "_bytes";
    return number("s3a" + micro_steps, bytes) - number("s2a" + micro_steps, bytes);
  };
  const int64_t once = moved("1", "written"), planned = number("s2a1", "/memory/disk/gradients/planned");
  EXPECT_LE(once, planned);
  EXPECT_GT(once, planned * 3 / 4);
  for (const int64_t micro_steps : {1, 2, 5}) {
    EXPECT_EQ(moved(std::to_string(micro_steps), "written"), micro_steps * once) << micro_steps;
    const int64_t read = number("s3a" + std::to_string(micro_steps), "/tiers/nvme/read_bytes");
    EXPECT_GE(read, 3 * micro_steps * once) << micro_steps;
    EXPECT_LT(read, 3 * micro_steps * once + once) << micro_steps;
  }
}

TEST_F(OffloadTest, ReadsTheNextGatheredWeightsAhead) {
  run(2, "job.name=a" + disk() + "offload.optimizer=device offload.parameters=nvme\n",
      kGathered + "parity.model=large strategy.zero3.prefetch_bytes=0 strategy.zero3.max_reuse_bytes=0 train.steps=6");
  const int64_t reads = number("a", "/overlap/disk_reads"), ahead = number("a", "/overlap/disk_reads_ahead");
  EXPECT_GT(reads, 0);
  EXPECT_GT(ahead, reads / 2) << "of " << reads;
}

// The causes are the phases of the steps without their waits for tiers, and these waits. A step does not include
// checkpoints and evaluations.
TEST_F(OffloadTest, AttributesTheTimeOfEveryStepToCauses) {
  const std::string tiers = disk() + kDiskBacked + "offload.activations=nvme offload.activation_bytes=1KiB ";
  run(2,
      "job.name=plain\njob.name=saved checkpoint.dir=c checkpoint.every=1" + tiers +
          "\njob.name=async checkpoint.dir=d checkpoint.every=2 checkpoint.async=true" + tiers + "\n",
      kGathered + "parity.model=large train.dtype=bf16");
  // An evaluation waits for the same disk-backed buffers as the step after it; its waits do not count for that step.
  const Outcome done =
      shell("ZR_TIER_FAULT=slow=1ms " + zeroth_bin() +
            "train " ZR_SOURCE_DIR
            "/examples/gpt/gpt.toml job.ranks=2 job.name=evaluated model.width=64 model.layers=2 model.heads=2 "
            "model.context=16 train.steps=4 eval.every=1 sample.length=0 offload.nvme.block_bytes=4KiB " +
            kGathered + "offload.nvme.path=" + scratch_.path("swap") + " offload.parameters=" + kFailing);
  ASSERT_EQ(done.code, 0) << done.output;
  for (const std::string name : {"plain", "saved", "async", "evaluated"}) {
    const Json report = summary(name);
    double causes = 0, phases = 0, steps = 0;
    for (const auto& [cause, ms] : report.at("waits_ms").items()) {
      EXPECT_GE(ms, 0) << name << " " << cause;
      EXPECT_EQ(ms > 0, name != "plain" || cause.rfind("disk_", 0) != 0) << name << " " << cause;
      causes += ms.get<double>();
    }
    for (const auto& [phase, ms] : report.at("time_ms").items())
      if (phase != "checkpoint") phases += ms.get<double>();
    std::ifstream rows(scratch_.path("runs/" + name + "/metrics.jsonl"));
    for (std::string row; std::getline(rows, row);) steps += Json::parse(row).value("step_ms", 0.0);
    EXPECT_NEAR(causes, steps, 1e-6 * steps) << name;
    EXPECT_NEAR(causes, phases, 1e-6 * phases) << name << ": no wait is longer than its phase";
  }
}

TEST_F(OffloadTest, UpdatesStatesInHostMemoryInPlace) {
  run(2, "job.name=a" + std::string(kMemory), "strategy=zero1");
  EXPECT_EQ(number("a", "/tiers/cpu/read_bytes"), 0);
  EXPECT_EQ(number("a", "/tiers/cpu/written_bytes"), 0);
}

// Per step, every byte of the states is read once and written once; nothing else is transferred.
TEST_F(OffloadTest, MovesEveryStateOncePerStepEachWay) {
  std::string jobs;
  for (const std::string steps : {"2", "3", "4"})
    jobs += "job.name=s" + steps + " train.steps=" + steps + disk() + "parity.model=large\n";
  run(2, jobs, "strategy=zero2 train.dtype=bf16");
  const int64_t disk_bytes =
      number("s3", "/memory/disk/optimizer/planned") + number("s3", "/memory/disk/master/planned");
  for (const char* way : {"/tiers/nvme/read_bytes", "/tiers/nvme/written_bytes"}) {
    EXPECT_EQ(number("s3", way) - number("s2", way), disk_bytes) << way;
    EXPECT_EQ(number("s4", way) - number("s3", way), disk_bytes) << way;
  }
}

TEST_F(OffloadTest, ComputesNormBlocksWhileGradientsArrive) {
  std::string jobs;
  for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3"})
    jobs += "job.name=" + strategy + " strategy=" + strategy + disk() + "\n";
  run(3, jobs);
  for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3"}) {
    EXPECT_GT(number(strategy, "/overlap/norm_blocks"), 0);
    EXPECT_EQ(number(strategy, "/overlap/norm_blocks_early"), number(strategy, "/overlap/norm_blocks")) << strategy;
  }
}

TEST_F(OffloadTest, RejectsImpossiblePlacements) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"strategy=zero2 offload.parameters=cpu",
       "offload.parameters = \"cpu\" (command line): strategy 'zero2' keeps full parameters on the device, so "
       "they cannot be offloaded; choose a strategy that shards parameters"},
      {"offload.device_fraction=0.5",
       "offload.device_fraction is the fraction of the optimizer states that stays on the device, but "
       "offload.optimizer = \"device\" keeps all of them there; set offload.optimizer to a tier"},
      {"offload.device_fraction=0.5 offload.optimizer=auto",
       "command line: offload.device_fraction is the fraction of the optimizer states that stays on the device, but "
       "offload.optimizer = \"auto\" computes it from memory.device_budget; set offload.optimizer to a tier, or remove "
       "offload.device_fraction"},
      {"strategy=zero1 offload.gradients=nvme train.gradient_accumulation=2 gradients.reduce=last_micro_step "
       "offload.nvme.path=" +
           scratch_.path("swap"),
       "offload.gradients = \"nvme\" (command line): strategy 'zero1' accumulates gradients in place in the buffer "
       "'gradients, unsharded', which cannot be on a disk tier; choose a strategy with a separate buffer for reduced "
       "gradients, gradients.reduce = \"each_micro_step\", or a tier in memory"},
      {"strategy=zero2 offload.parameters=nvme offload.nvme.path=" + scratch_.path("swap"),
       "strategy 'zero2' keeps full parameters on the device"},
      {"offload.optimizer=cpy", "there is no offload plug-in 'cpy'; did you mean 'cpu'?"},
      {"offload.optimizer=nvme", "missing key 'offload.nvme.path'"},
      {"offload.optimizer=nvme offload.nvme.path=" + scratch_.path("none"), scratch_.path("none")}};
  for (const auto& [overrides, text] : cases) {
    const Outcome rejected = shell(launch(2, engine_tests::trains, overrides));
    EXPECT_NE(rejected.code, 0) << overrides;
    EXPECT_THAT(rejected.output, HasSubstr(text)) << overrides;
  }
}

// The files below a folder that a process has open and that are not empty, as the kernel names them.
std::vector<std::string> open_below(const std::string& folder, pid_t pid) {
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", error)) {
    const std::string name = fs::read_symlink(entry.path(), error).string();
    if (name.rfind(folder + "/", 0) == 0 && fs::file_size(entry.path(), error) > 0) found.push_back(name);
  }
  return found;
}

// A job of two ranks that is killed after it has trained steps with its states on disk.
class OffloadKillTest : public OffloadTest {
 protected:
  std::string killed(const std::string& environment, const std::string& overrides) const {
    return "cd " + scratch_.folder().string() + " && exec env " + environment + " " +
           launch(2, engine_tests::trains, "strategy=zero2 train.steps=1000000 job.name=killed " + disk() + overrides);
  }
  // Kills all ranks at once; appends to `open` the files in the tier's folder that each rank had open.
  void run_and_kill(const std::string& command, std::vector<std::vector<std::string>>& open) const {
    Scene scene;
    Job job(scene, {"sh", "-c", command});
    ASSERT_TRUE(eventually([&] { return gone(job.pid()) || losses("killed").size() > 1; })) << job.err();
    const std::vector<pid_t> ranks = ranks_of(job.pid());
    ASSERT_EQ(ranks.size(), 2u) << job.err();
    for (const pid_t rank : ranks) open.push_back(open_below(scratch_.path("swap"), rank));
    for (const pid_t rank : ranks) EXPECT_EQ(::kill(rank, SIGKILL), 0);
    EXPECT_EQ(job.wait(), 4) << job.err();
    EXPECT_THAT(job.err(), HasSubstr("was killed by signal 9 (SIGKILL)"));
    for (const pid_t rank : ranks) EXPECT_TRUE(gone(rank));
  }
};

TEST_F(OffloadKillTest, LeavesNoFiles) {
  std::vector<std::vector<std::string>> open;
  run_and_kill(killed("", ""), open);
  ASSERT_EQ(open.size(), 2u);
  for (const auto& files : open) {
    ASSERT_EQ(files.size(), 1u);
    EXPECT_THAT(files[0], EndsWith(" (deleted)"));
  }
  EXPECT_EQ(names_in("swap"), std::vector<std::string>{});
}

TEST_F(OffloadKillTest, NextJobRemovesFilesThatAKilledJobLeft) {
  std::vector<std::vector<std::string>> open;
  run_and_kill(killed("ZR_TIER_FAULT=unnamed=EOPNOTSUPP", std::string("offload.optimizer=") + kFailing), open);
  ASSERT_EQ(open.size(), 2u);
  const std::vector<std::string> left = names_in("swap");
  ASSERT_EQ(left.size(), 1u);
  EXPECT_THAT(left[0], StartsWith("zeroth-swap-"));
  EXPECT_EQ(names_in("swap/" + left[0]), (std::vector<std::string>{"lock", "rank-0", "rank-1"}));
  for (const auto& files : open)
    EXPECT_THAT(files, ElementsAre(StartsWith(scratch_.path("swap/" + left[0] + "/rank-"))));
  run(2, "job.name=next" + disk() + "\n", "strategy=zero2");
  EXPECT_EQ(names_in("swap"), std::vector<std::string>{});
}

TEST_F(OffloadTest, TraceShowsTransfersDuringTheOptimizer) {
  run(2, "job.name=t job.trace=true" + disk() + "\n", "strategy=zero2");
  for (const std::string rank : {"0", "1"}) {
    const Json trace = Json::parse(std::ifstream(scratch_.path("runs/t/latest/trace-" + rank + ".json")));
    std::map<int, std::string> tracks;
    std::set<std::string> training, transfers;
    double optimizer_begin = 0, optimizer_end = 0;
    int within = 0;
    for (const Json& event : trace)
      if (event.at("name") == "thread_name") tracks[event.at("tid")] = event.at("args").at("name");
    for (const Json& event : trace) {
      if (event.at("ph") != "X") continue;
      const std::string name = event.at("name"), track = tracks.at(event.at("tid"));
      if (track == "training") training.insert(name);
      if (track == "nvme") transfers.insert(name.substr(0, name.find(' ')));
      if (name == "optimizer") {
        optimizer_begin = event.at("ts");
        optimizer_end = optimizer_begin + event.at("dur").get<double>();
      }
    }
    for (const Json& event : trace)  // in the last step, whose transfers are recorded after its phases
      if (event.at("ph") == "X" && tracks.at(event.at("tid")) == "nvme")
        within += event.at("ts") >= optimizer_begin && event.at("ts") <= optimizer_end;
    EXPECT_EQ(transfers, (std::set<std::string>{"read", "write"}));
    for (const char* phase : {"forward", "backward", "reduce", "optimizer", "wait: read"})
      EXPECT_EQ(training.count(phase), 1u) << phase;
    EXPECT_GT(within, 2) << "transfers start while the optimizer runs";
  }
}

}  // namespace
}  // namespace zr::test
