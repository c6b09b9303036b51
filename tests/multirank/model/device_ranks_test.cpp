// Training state in memory of the devices of several ranks: collectives in the order of streams.
#include <gmock/gmock.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>

#include "multirank/model/device_engine_test.hpp"
#include "support/launch_job.hpp"

namespace {

using namespace engine_tests;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kRanksModel = " parity.model=everything train.steps=3 train.gradient_accumulation=2 job.threads=1";

class DeviceRanksTest : public DeviceEngineTest {
 protected:
  // The line of rank 0 with the loss and the hash of the weights; "failed" if the job failed.
  std::string result(int ranks, const zr::test::RankBody& body, const std::string& overrides,
                     const std::string& environment = "") {
    const auto done = launch(ranks, program(ranks, body, overrides + kRanksModel), environment);
    if (done.code != 0) return "failed with " + std::to_string(done.code) + ": " + done.output;
    const auto at = done.output.find("result ");
    return at == done.output.npos ? done.output : done.output.substr(at);
  }
};

RANK_BODY(trains_and_prints_loss, Run) {
  run.build();
  run.train();
  print_result(run);
}

const std::vector<std::string> kRanksJobs{"strategy=zero0 train.dtype=bf16",
                                          "strategy=zero1 train.gradient_clipping=0.1",
                                          "strategy=zero2 train.dtype=bf16", "strategy=zero3 train.dtype=bf16"};

// Each seed of delays with one of these jobs, in turn.
const std::vector<std::string> kSeedJobs = [] {
  const std::string disk =
      " offload.nvme.path=" ZR_BUILD_DIR "/tests/swap offload.nvme.block_bytes=4KiB offload.nvme.depth=1";
  std::vector<std::string> jobs = kRanksJobs;
  jobs.insert(jobs.end(),
              {"strategy=zero2 train.dtype=bf16 offload.optimizer=cpu", "strategy=zero3 offload.optimizer=nvme" + disk,
               "strategy=zero1 train.dtype=bf16 offload.activations=cpu offload.activation_bytes=1B",
               "strategy=zero2 offload.activations=nvme offload.activation_bytes=1B" + disk});
  return jobs;
}();

class DeviceSeedsTest : public DeviceRanksTest {
 protected:
  void compare(int first, int last) {
    std::map<std::string, std::string> plain;  // by job
    for (int seed = first; seed < last; ++seed) {
      const std::string& job = kSeedJobs[static_cast<size_t>(seed) % kSeedJobs.size()];
      std::string& expected = plain[job];
      if (expected.empty()) expected = result(2, trains_and_prints_loss, job + kDevice);
      ASSERT_THAT(expected, HasSubstr("result ")) << job;
      EXPECT_EQ(
          result(2, trains_and_prints_loss, job + kDevice, "ZR_SIM_DELAY_US=100 ZR_SIM_SEED=" + std::to_string(seed)),
          expected)
          << job << ", seed " << seed;
    }
  }
};

TEST_F(DeviceSeedsTest, TwentySeedsOfDelaysChangeNothing) { compare(0, 20); }
TEST_F(DeviceSeedsTest, SLOW_TwoHundredSeedsOfDelaysChangeNothing) { compare(20, 200); }

// Ranks whose devices share no memory exchange and update in host memory, with the same bits.
TEST_F(DeviceRanksTest, WithoutSharedMemoryTheStateIsInHostMemory) {
  const std::string job = kRanksJobs[2] + kDevice;
  const auto done = launch(2, program(2, trains_and_prints_loss, job + kRanksModel), "ZR_SIM_DEFECT=alone");
  EXPECT_EQ(done.code, 0);
  EXPECT_THAT(done.output,
              HasSubstr("optimizer states are in host memory, and the CPU updates them, because communicator "
                        "'shm' ("));
  EXPECT_THAT(done.output, HasSubstr(result(2, trains_and_prints_loss, job)));
}

// The rank that is first ends; the other one then finds its process gone, or is ended.
TEST_F(DeviceRanksTest, MemoryThatPeersCannotOpenEndsTheJobAtTheStart) {
  const std::string said = result(2, trains_and_prints_loss, kRanksJobs[0] + kDevice, "ZR_SIM_DEFECT=sealed");
  EXPECT_THAT(said, HasSubstr("failed with 4"));
  EXPECT_THAT(said, ContainsRegex("open: the memory of rank [01]'s device cannot be opened: a sealed container; start "
                                  "all ranks in one container with the same visible devices, or set "
                                  "offload.gradients = \"cpu\" to exchange in host memory"));
  EXPECT_THAT(said, Not(HasSubstr("step 1")));
}

// Each of these planted defects gives another result or ends the job, with one of these seeds at the latest. Memory
// that is written too early is found by CommDeviceLifeTest: strategies do not use the memory of a collective again at
// once.
TEST_F(DeviceRanksTest, PlantedDefectsAreFound) {
  const std::vector<std::string> jobs{kRanksJobs[0] + kDevice, kRanksJobs[3] + kDevice};
  std::vector<std::string> right;
  for (const std::string& job : jobs) right.push_back(result(2, trains_and_prints_loss, job));
  for (const std::string defect : {"wait", "stream", "host"}) {
    bool found = false;
    for (int seed = 0; seed < 40 && !found; ++seed) {
      const std::string environment =
          "ZR_SIM_DEFECT=" + defect + " ZR_SIM_DELAY_US=2000 ZR_SIM_SEED=" + std::to_string(seed);
      for (std::size_t i = 0; i < jobs.size(); ++i)
        found |= result(2, trains_and_prints_loss, jobs[i], environment) != right[i];
    }
    EXPECT_TRUE(found) << defect;
  }
}

// Gathered weights that do not fit the all-gather buffer are in further memory of the device.
TEST_F(DeviceRanksTest, WeightsBeyondTheAllGatherBufferAreOnTheDevice) {
  const std::string job =
      "strategy=zero3 strategy.zero3.persistence_threshold=0 strategy.zero3.max_live_bytes=1KiB "
      "strategy.zero3.prefetch_bytes=0B";
  EXPECT_EQ(result(2, trains_and_prints_loss, job + kDevice), result(2, trains_and_prints_loss, job));
}

// Ranks without states of their own decide as the others do where the state is.
RANK_BODY(trains_two_numbers, Run) {
  auto model = std::make_shared<torch::nn::Module>();
  const torch::Tensor weight = model->register_parameter("w", torch::ones({2}));
  zr::Engine engine(run.program, *model);
  while (!engine.done()) {
    engine.backward((weight * weight).sum());
    engine.step();
  }
  const std::string hash = engine.weights_hash();
  if (engine.rank() == 0) std::cout << "result " << hash << std::endl;
}

TEST_F(DeviceRanksTest, RanksWithoutStatesAgreeAboutTheirPlace) {
  for (const std::string more : {"", " offload.optimizer=cpu"})
    for (const std::string strategy : {"strategy=zero1", "strategy=zero3"})
      EXPECT_EQ(result(4, trains_two_numbers, strategy + more + kDevice),
                result(4, trains_two_numbers, strategy + more))
          << strategy << more;
}

// A rank that writes other values to a weight is found, as in host memory.
RANK_BODY(writes_other_values_on_rank_one, Run) {
  run.build();
  run.micro_step();
  run.micro_step();
  if (run.engine->rank() == 1) {
    const torch::NoGradGuard no_grad;
    run.model->named_parameters()["twice.weight"].fill_(3);
  }
  run.train();
}

TEST_F(DeviceRanksTest, WeightsThatDifferBetweenRanksAreFound) {
  for (const std::string strategy : {"strategy=zero2", "strategy=zero3"}) {
    const std::string said = result(2, writes_other_values_on_rank_one, strategy + kDevice);
    EXPECT_THAT(said, HasSubstr("failed with 2"));
    EXPECT_THAT(said, HasSubstr("weights differ between ranks: in 'twice.weight', elements "));
  }
}

// The same for weights that every rank writes in a zr::gather scope.
RANK_BODY(writes_other_values_in_a_scope, Run) {
  run.build();
  run.micro_step();
  {
    torch::Tensor weight = run.model->named_parameters()["twice.weight"];
    const torch::NoGradGuard no_grad;
    const auto scope = zr::gather(weight);
    weight.view(-1).slice(0, 17, 18).fill_(run.engine->rank());
  }
  run.train();
}

TEST_F(DeviceRanksTest, ValuesThatDifferInAGatherScopeAreFound) {
  const std::string said = result(2, writes_other_values_in_a_scope, "strategy=zero3" + kDevice);
  EXPECT_THAT(said, HasSubstr("failed with 2"));
  EXPECT_THAT(said, HasSubstr("weights differ between ranks: in 'twice.weight', elements 0 to 1295, rank 1 wrote "
                              "different values than rank 0 (found in step 1)"));
}

// A rank whose device has no memory left can still compare and hash weights.
RANK_BODY(hashes_with_a_full_device, Run) {
  run.build();
  run.micro_step();
  std::vector<torch::Tensor> filler;
  for (int64_t bytes = run.engine->rank() == 1 ? int64_t{1} << 24 : 0; bytes >= 512; bytes /= 2) try {
      for (;;) filler.push_back(torch::empty({bytes}, torch::TensorOptions(torch::kByte).device(run.engine->device())));
    } catch (const c10::OutOfMemoryError&) {
    }
  const std::string hash = run.engine->weights_hash();
  filler.clear();
  run.train();
  const std::string end = run.engine->weights_hash();
  if (run.engine->rank() == 0) std::cout << "result " << hash << " " << end << std::endl;
}

TEST_F(DeviceRanksTest, WeightsAreHashedWithAFullDevice) {
  for (const std::string& job : {kRanksJobs[1], kRanksJobs[3]})
    EXPECT_EQ(result(2, hashes_with_a_full_device, job + kDevice, "ZR_SIM_BYTES=60000000"),
              result(2, hashes_with_a_full_device, job + kDevice + " offload.optimizer=cpu"))
        << job;
}

// One rank fails where the others wait for it: the job ends soon, and the message names the rank.
class OneRankFailsTest : public DeviceRanksTest {
 protected:
  void expect_report(const zr::test::RankBody& body, const std::string& job, const std::string& says,
                     const std::string& environment = "") {
    const auto begin = std::chrono::steady_clock::now();
    const std::string output = result(2, body, job + kDevice, environment);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30)) << "communicator.timeout is 5 min";
    EXPECT_THAT(output, AllOf(HasSubstr("failed with "), HasSubstr(says))) << job;
  }
};

// The exception leaves the scope, so this rank does not take part in its end.
RANK_BODY(throws_in_a_gather_on_rank_one, Run) {
  run.build();
  {
    const auto full = zr::gather(run.model->parameters());
    if (run.engine->rank() == 1) throw std::runtime_error("planted in the scope");
  }
  run.train();
}

// The same, but the program continues.
RANK_BODY(catches_in_a_gather_on_rank_one, Run) {
  run.build();
  try {
    const auto full = zr::gather(run.model->parameters());
    if (run.engine->rank() == 1) throw std::runtime_error("planted in the scope");
  } catch (const std::runtime_error&) {
  }
  run.train();
}

TEST_F(OneRankFailsTest, InAGatherScope) {
  for (const std::string& job : {kRanksJobs[1], kRanksJobs[3]}) {
    expect_report(throws_in_a_gather_on_rank_one, job, "rank 1");
    expect_report(throws_in_a_gather_on_rank_one, job, "planted in the scope");
    expect_report(catches_in_a_gather_on_rank_one, job, "rank 1");
  }
}

// Rank 1 has no memory for the result on its device.
RANK_BODY(sums_with_a_full_device, Run) {
  run.build();
  const auto on_device = torch::TensorOptions(torch::kByte).device(run.engine->device());
  const torch::Tensor values = torch::ones({int64_t{1} << 20}, on_device);
  std::vector<torch::Tensor> filler;
  for (int64_t bytes = run.engine->rank() == 1 ? int64_t{1} << 24 : 0; bytes >= 512; bytes /= 2) try {
      for (;;) filler.push_back(torch::empty({bytes}, on_device));
    } catch (const c10::OutOfMemoryError&) {
    }
  run.engine->sum(values);
  run.train();
}

TEST_F(OneRankFailsTest, InASumWithoutMemory) {
  for (const std::string& job : {kRanksJobs[1], kRanksJobs[3]})
    expect_report(sums_with_a_full_device, job, "rank 1", "ZR_SIM_BYTES=60000000");
}

// Rank 1 is lost, and there is no launcher that would end rank 0.
class NoLauncherTest : public DeviceRanksTest {
 protected:
  zr::testing::Outcome survivor(const zr::test::RankBody& body) {
    const std::string rank = program(2, body, kRanksJobs[2] + kRanksModel + kDevice);
    const int port = 20000 + ::getpid() % 8000;
    return shell("export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(port) +
                 "; (RANK=1 LOCAL_RANK=1 " + rank + " > /dev/null 2>&1 &) ; RANK=0 LOCAL_RANK=0 timeout -s KILL 60 " +
                 rank);
  }
};

// As exit handlers of a device's library may do, for streams that wait for the lost peer.
void wait_at_exit() {
  std::atexit([] {
    for (;;) ::pause();
  });
}

RANK_BODY(loses_a_rank_in_training, Run) {
  wait_at_exit();
  run.build();
  run.micro_step();
  if (run.engine->rank() == 1) std::_Exit(7);
  run.train();
}

RANK_BODY(loses_a_rank_at_the_start, Run) {
  wait_at_exit();
  if (run.program.rank() == 1) std::_Exit(7);
  run.build();
}

TEST_F(NoLauncherTest, DoesNotWaitForTheDeviceAtExit) {
  for (const zr::test::RankBody* body : {&loses_a_rank_in_training, &loses_a_rank_at_the_start}) {
    const auto done = survivor(*body);
    EXPECT_EQ(done.code, 4) << body->name() << done.output;
    EXPECT_THAT(done.output, HasSubstr("rank 1"));
  }
}

// The 4 ranks share 2 devices.
TEST_F(DeviceRanksTest, MoreRanksThanDevicesHaveTheBitsOfTheCpu) {
  for (const std::string& job : {kRanksJobs[1], kRanksJobs[3]})
    EXPECT_EQ(result(4, trains_and_prints_loss, job + kDevice), result(4, trains_and_prints_loss, job)) << job;
}

TEST_F(DeviceRanksTest, NcclHasTheBitsOfShmUnderEveryStrategy) {
  for (const std::string& job : kRanksJobs)
    EXPECT_EQ(result(2, trains_and_prints_loss, job + kNccl, "ZR_SIM_DELAY_US=100"),
              result(2, trains_and_prints_loss, job + kDevice))
        << job;
}

TEST_F(DeviceRanksTest, NcclHasTheBitsOfShmWithStateInHostMemory) {
  const std::string job = kRanksJobs[2] + " offload.optimizer=cpu";
  EXPECT_EQ(result(2, trains_and_prints_loss, job + kNccl), result(2, trains_and_prints_loss, job + kDevice));
}

TEST_F(DeviceRanksTest, NcclNeedsADeviceForEachRank) {
  const std::string output = result(3, trains_and_prints_loss, kRanksJobs[0] + kNccl);
  EXPECT_THAT(output, HasSubstr("failed with 3"));
  EXPECT_THAT(output, HasSubstr("ranks 0 and 2 both use GPU sim:0"));
}

// NCCL compares nothing: the control plane does.
RANK_BODY(calls_other_collectives, Run) {
  run.build();
  const torch::Tensor values = torch::ones({100}).to(run.engine->device());
  if (run.engine->rank() == 0)
    run.engine->sum(values);
  else
    run.engine->broadcast(values, 0);
  run.train();
}

TEST_F(DeviceRanksTest, RanksThatCallOtherCollectivesOfNcclAreNamed) {
  const std::string said = result(2, calls_other_collectives, kRanksJobs[0] + kNccl + " communicator.timeout=5s");
  EXPECT_THAT(said, HasSubstr("failed with"));
  EXPECT_THAT(said, HasSubstr("differs between ranks: rank 0 issued engine.sum(Float [100]), rank 1 issued "
                              "engine.broadcast(Float [100], 0)"));
}

// A job whose ranks do not finish opening the communicator; connect_timeout is 2 minutes.
class NcclOpenTest : public DeviceRanksTest {
 protected:
  std::string failure(const std::string& environment, const zr::test::RankBody& body = trains_and_prints_loss) {
    const auto begin = std::chrono::steady_clock::now();
    std::string output = result(2, body, kRanksJobs[0] + kNccl + " communicator.timeout=2s", environment);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60)) << "long before connect_timeout";
    return output;
  }
};

TEST_F(NcclOpenTest, EndsIfARankIsKilledWhileNcclConnects) {
  EXPECT_THAT(failure("ZR_SIM_NCCL_KILLED=1"),
              AllOf(HasSubstr("failed with 4"), HasSubstr("rank 1"), HasSubstr("killed")));
}

TEST_F(NcclOpenTest, EndsAfterTheTimeoutIfNcclDoesNotConnect) {
  EXPECT_THAT(failure("ZR_SIM_NCCL_STUCK=1"),
              AllOf(HasSubstr("failed with 4"),
                    HasSubstr("waited longer than communicator.timeout (2.0s) in open of communicator 'nccl'")));
}

RANK_BODY(rank_1_sleeps, Run) {
  if (std::string(std::getenv("ZR_RANK")) == "1") std::this_thread::sleep_for(std::chrono::seconds(100));
  run.build();
}

TEST_F(NcclOpenTest, EndsAfterTheTimeoutIfARankNeverArrives) {
  EXPECT_THAT(failure("", rank_1_sleeps),
              AllOf(HasSubstr("failed with 4"), HasSubstr("rank 1"),
                    // The engine's limit and that of the plug-in's wait end at the same time.
                    AnyOf(HasSubstr("communicator.timeout (2.0s) in open of communicator 'nccl'"),
                          HasSubstr("rank 1 has not opened communicator 'nccl'"))));
}

RANK_BODY(trains_without_end_on_device, Run) {
  run.build();
  run.train();
}

class DeviceRankLossTest : public DeviceRanksTest {
 protected:
  // Starts two ranks that train on the device; returns after more than three steps.
  void start(const std::string& more) {
    std::vector<std::string> words = zr::test::rank_words(trains_without_end_on_device);
    words.insert(words.end(), {toml_, "job.name=run", "job.runs=\"" + scene_.folder().string() + "\"", "job.threads=1",
                               "job.ranks=2", "train.steps=1000000", "parity.model=everything", "job.device=sim",
                               "job.device_library=" + kSimLibrary, "strategy=zero2", more});
    job_ = std::make_unique<zr::test::Job>(scene_, zr::test::launch_of(2, words));
    const auto steps = [&] {
      std::ifstream in(scene_.folder() / "run" / "metrics.jsonl");
      return std::count(std::istreambuf_iterator<char>(in), {}, '\n');
    };
    ASSERT_TRUE(zr::test::eventually([&] { return steps() > 3; }, zr::test::milliseconds(60000))) << job_->err();
    std::ifstream children("/proc/" + std::to_string(job_->pid()) + "/task/" + std::to_string(job_->pid()) +
                           "/children");
    for (pid_t pid; children >> pid;) ranks_.push_back(pid);
    ASSERT_EQ(ranks_.size(), 2u);
  }
  zr::test::Scene scene_;
  std::unique_ptr<zr::test::Job> job_;
  std::vector<pid_t> ranks_;
};

TEST_F(DeviceRankLossTest, AKilledRankEndsTheJobAndIsNamed) {
  start("communicator.timeout=5min");
  if (HasFatalFailure()) return;
  kill(ranks_[1], SIGKILL);
  EXPECT_EQ(job_->wait(zr::test::milliseconds(10000)), 4) << job_->err();
  EXPECT_THAT(job_->err(), HasSubstr("rank 1 (pid " + std::to_string(ranks_[1]) + ") was killed by signal 9"));
}

TEST_F(DeviceRankLossTest, AStoppedRankIsReportedAfterTheTimeout) {
  start("communicator.timeout=1s");
  if (HasFatalFailure()) return;
  kill(ranks_[1], SIGSTOP);
  EXPECT_EQ(job_->wait(zr::test::milliseconds(30000)), 4) << job_->err();
  EXPECT_THAT(job_->err(), HasSubstr("waited longer than communicator.timeout (1.0s) in "));
}

}  // namespace
