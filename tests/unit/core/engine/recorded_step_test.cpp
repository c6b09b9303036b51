// The collectives of a step of the shipped strategies, and what they transfer, without ranks.
#include "engine/recorded_step.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "comm/coll.hpp"
#include "comm/comm_volume.hpp"
#include "engine/planner.hpp"
#include "one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;

// Sizes without padding: multiples of the alignment, but not of the ranks or of a norm block.
std::vector<plan::Parameter> blocks_of(int layers, int64_t width) {
  std::vector<plan::Parameter> all;
  const auto add = [&](const std::string& name, int64_t count, bool frozen = false) {
    all.push_back({name, {}, {count}, count, frozen});
  };
  add("embedding.weight", 33 * width);
  for (int i = 0; i < layers; ++i) {
    const std::string layer = "layers." + std::to_string(i);
    add(layer + ".norm.weight", width);
    add(layer + ".proj.weight", width * width);
    add(layer + ".proj.bias", width);
  }
  add("old.weight", 5 * width, true);
  add("head.weight", 33 * width);
  return all;
}

class RecordedStepTest : public ::testing::Test {
 protected:
  plugin::ResolvedJob job(int world, std::vector<std::string> overrides) const {
    overrides.insert(overrides.end(),
                     {"optimizer=adamw", "train.micro_batch=1", "job.name=unit", "job.runs=" + scratch_.path("runs")});
    const plugin::Registry registry({ZR_BUILD_DIR "/plugins"});
    return plugin::resolve_job(config::Document::parse("", "job.toml", overrides), registry, {}, world);
  }
  void record(const plugin::ResolvedJob& of, const plan::MemoryPlan& plan, const engine::CollectiveSink& sink) {
    engine::record_step(host_, of, plan, sink);
  }
  const test::Scratch scratch_;

 private:
  Ledger ledger_;
  ThreadPool pool_{1};
  engine::EngineHost host_{ledger_, pool_};
};

class RecordedStrategyTest : public RecordedStepTest, public ::testing::WithParamInterface<std::string> {};

// Every rank of a large job issues the same collectives, and they bring what `zeroth plan` says, to the byte.
TEST_P(RecordedStrategyTest, ThousandRanksReceiveWhatThePlanSays) {
  constexpr int kWorld = 1024;
  for (const auto& [dtype, reduce] : {std::pair("fp32", "each_micro_step"), {"bf16", "last_micro_step"}}) {
    const plugin::ResolvedJob of =
        job(kWorld,
            {"strategy=" + GetParam(), std::string("train.dtype=") + dtype, std::string("gradients.reduce=") + reduce,
             "train.gradient_accumulation=2", "strategy." + GetParam() + ".bucket_bytes=256KiB", "communicator=shm"});
    const engine::Planner planner(of, blocks_of(3, 160), kWorld);
    const plan::StepCommunication planned = planner.plan(0).communication();
    std::vector<uint64_t> first;
    std::vector<int64_t> received(16, 0);
    for (int rank = 0; rank < kWorld; ++rank) {
      std::vector<uint64_t> own;
      const comm::CommVolumeCounter counter(rank, kWorld);
      record(of, planner.plan(rank), [&](const zr_coll& coll) {
        own.push_back(comm::fingerprint_of(coll, kWorld));
        received[coll.op] += counter.received_bytes(coll);
      });
      if (rank == 0) first = own;
      ASSERT_EQ(own, first) << "rank " << rank;
    }
    EXPECT_GT(first.size(), 2u) << "several buckets";
    const int64_t all = std::accumulate(received.begin(), received.end(), int64_t{0});
    if (GetParam() != "zero3") {
      EXPECT_EQ(all, planned.bytes()) << dtype;
      continue;
    }
    EXPECT_EQ(received[ZR_REDUCE_SCATTER], planned.gradients.bytes());
    EXPECT_EQ(all - received[ZR_REDUCE_SCATTER], received[ZR_ALL_GATHER]) << "no other collectives";
    const int64_t gathers = planned.gathers.bytes() + planned.weights.bytes();
    EXPECT_LE(received[ZR_ALL_GATHER], gathers) << "the plan is an upper bound";
    EXPECT_GE(received[ZR_ALL_GATHER], gathers / 2) << "the weights of forward, at least";
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, RecordedStrategyTest, ::testing::Values("zero0", "zero1", "zero2", "zero3"),
                         [](const auto& info) { return info.param; });

// A sink that fails ends the recording with its error.
TEST_F(RecordedStepTest, PassesTheErrorOfTheSinkOn) {
  const plugin::ResolvedJob of = job(2, {"strategy=zero1", "communicator=shm"});
  const engine::Planner planner(of, blocks_of(1, 64), 2);
  EXPECT_EQ(failure_of([&] { record(of, planner.plan(0), [](const zr_coll&) { fail_user("no more"); }); }), "no more");
}

// Buffers of terabytes take no memory.
TEST_F(RecordedStepTest, PlansAModelThatDoesNotFit) {
  constexpr int64_t kElements = int64_t{1} << 38;
  const plugin::ResolvedJob of = job(4, {"strategy=zero1", "communicator=shm"});
  const engine::Planner planner(of, {{"w", {}, {kElements}, kElements}}, 4);
  int64_t collectives = 0;
  record(of, planner.plan(0), [&](const zr_coll&) { ++collectives; });
  EXPECT_GE(collectives, 2);
}

}  // namespace
}  // namespace zr::testing
