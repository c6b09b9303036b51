// The tiers that `auto` selects for parts of the training state within the budgets, and the reasons it reports.
#include "plan/placement.hpp"

#include <gtest/gtest.h>

#include "base/draft_abi.hpp"
#include "base/error.hpp"
#include "plan/plan.hpp"

namespace {

using namespace zr::host;

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kElements = 8 * kMiB;  // elements of all parameters
constexpr int64_t kStates = 8 * kElements;

enum Place { device, cpu, nvme };

struct Job {
  explicit Job(int64_t parameters = 2) : each(kElements / parameters) {
    for (int64_t i = 0; i < parameters; ++i) in.parameters.push_back({std::to_string(i), {}, {each}, each, false, 0});
    in.descriptions[0].slots = {{"m", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}, {"v", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}};
    in.tiers.push_back({"cpu", Tier::host});
    in.tiers.push_back({"nvme", Tier::disk, kMiB, 8, 4096, 1024});
  }
  // Weights 32 MiB and reduced gradients 32 MiB, on one rank; `sharded`: weights are shards that are gathered.
  plan::MemoryPlan plan() const {
    const plan::StrategyPlan strategy = [this](const zr_plan_in& of, const zr_plan_sink& sink) {
      const uint32_t role = shards ? ZR_ROLE_WEIGHT_SHARD : ZR_ROLE_WEIGHT;
      const zr_buffer buffers[] = {{sizeof(zr_buffer), role, "weights", kElements, of.weight_dtype, 0},
                                   {sizeof(zr_buffer), ZR_ROLE_REDUCED_GRAD, "sums", kElements, ZR_F32, 0}};
      for (const zr_buffer& buffer : buffers) sink.buffer(sink.ctx, &buffer);
      for (const uint32_t kind : {used_whole ? uint32_t{ZR_ROLE_WEIGHT} : role, uint32_t{ZR_ROLE_REDUCED_GRAD}})
        for (uint32_t p = 0; p < of.n_params; ++p) {
          const zr_piece piece{sizeof(zr_piece), kind, p, kind == ZR_ROLE_REDUCED_GRAD, 0, each, p * each};
          sink.piece(sink.ctx, &piece);
        }
    };
    return plan_of_rank(in, 0, strategy);
  }
  // The bytes of the plan with everything on the device.
  int64_t all_on_device() const {
    Job plain(kElements / each);
    plain.shards = shards;
    plain.used_whole = used_whole;
    return plain.plan().bytes();
  }
  int64_t each;  // elements per parameter
  plan::PlanInput in;
  bool shards = false, used_whole = false;
};

int64_t states_on(const plan::MemoryPlan& plan, Place place) {
  int64_t bytes = 0;
  for (const plan::StateRange& run : plan.placement.states) bytes += run.tier == place ? 8 * run.count : 0;
  return bytes;
}

std::string why(const plan::MemoryPlan& plan, const std::string& part) {
  for (const plan::TierAssignment& one : plan.placement.parts)
    if (one.part.rfind(part, 0) == 0) return plan.input.tiers[static_cast<std::size_t>(one.tier)].id + ": " + one.why;
  return "";
}

TEST(PlacementTest, StatesFillEachBudgetWithoutExceedingIt) {
  for (const int64_t on_device : {int64_t{0}, kMiB, 20 * kMiB, 63 * kMiB, 64 * kMiB})
    for (const int64_t host : {33 * kMiB, 40 * kMiB, 50 * kMiB, 96 * kMiB, 200 * kMiB}) {
      SCOPED_TRACE(std::to_string(on_device >> 20) + " MiB for states on the device, " + std::to_string(host >> 20) +
                   " of host memory");
      Job job;
      job.in.tier_request.states = plan::kAnyTier;
      job.in.tier_request.activations_known = true;
      job.in.tier_request.device_capacity = job.all_on_device() - kStates + on_device;
      job.in.tier_request.host_capacity = host;
      const plan::MemoryPlan plan = job.plan();
      EXPECT_EQ(states_on(plan, device), on_device / (8 * plan::kNormBlock) * 8 * plan::kNormBlock);
      EXPECT_LE(plan.bytes(), job.in.tier_request.device_capacity);
      EXPECT_LE(plan.bytes(Tier::host), host);
      EXPECT_EQ(states_on(plan, device) + states_on(plan, cpu) + states_on(plan, nvme), kStates);
      const bool fit = on_device + host >= kStates;
      EXPECT_EQ(plan.placement.tiles.empty(), fit);
      EXPECT_LT(fit ? 0 : host - plan.bytes(Tier::host), 17 * plan::kNormBlock)
          << "states on disk would fit in host memory";
    }
}

TEST(PlacementTest, StatesLeaveCapacityForACheckpointCopy) {
  Job job;
  job.in.tier_request.states = plan::kAnyTier;
  job.in.tier_request.activations_known = true;
  job.in.tier_request.device_capacity = job.all_on_device() - kStates;
  job.in.tier_request.host_capacity = 150 * kMiB;
  EXPECT_EQ(states_on(job.plan(), cpu), kStates);
  job.in.tier_request.snapshot = true;
  const plan::MemoryPlan plan = job.plan();
  EXPECT_GT(states_on(plan, cpu), 0);
  EXPECT_LE(plan.bytes(Tier::host) + plan.snapshot_bytes(), job.in.tier_request.host_capacity);
}

TEST(PlacementTest, ReducedGradientsUseADiskOnlyWhenItsBuffersTakeLess) {
  Job job;
  job.in.tier_request.reduced_gradients = plan::kAnyTier;
  job.in.tier_request.activations_known = true;
  job.in.tier_request.device_capacity = job.all_on_device() - kMiB;
  job.in.tier_request.host_capacity = 40 * kMiB;
  EXPECT_EQ(job.plan().placement.reduced_gradients, cpu);
  job.in.tier_request.host_capacity =
      30 * kMiB;  // two megabytes short, and two parameters of 16 MiB pass through chunks of 32
  EXPECT_EQ(job.plan().placement.reduced_gradients, device) << "over by one, which is least";
  job.in.tier_request.device_capacity = job.all_on_device() - 32 * kMiB;
  EXPECT_EQ(job.plan().placement.reduced_gradients, cpu) << "over by two, which is least";
  Job small(64);
  small.in.tier_request = job.in.tier_request;
  EXPECT_EQ(small.plan().placement.reduced_gradients, nvme) << "chunks take 18 MiB";
}

TEST(PlacementTest, ShardsUsedUngatheredAreNeverOnADisk) {
  Job job(64);
  job.shards = true;
  job.in.tier_request.shards = plan::kAnyTier;
  job.in.tier_request.activations_known = true;
  job.in.tier_request.device_capacity = job.all_on_device() - 40 * kMiB;
  job.in.tier_request.host_capacity = 24 * kMiB;
  EXPECT_EQ(job.plan().placement.shards, nvme) << "gathered around their uses";
  job.used_whole = true;
  EXPECT_EQ(job.plan().placement.shards, cpu) << "over by eight, which is least";
}

TEST(PlacementTest, ActivationsUseTheDiskWhenMemoryIsFull) {
  Job job;
  job.in.tier_request.activations = plan::kAnyTier;
  job.in.tier_request.activations_known = true;
  job.in.tier_request.activations_on_device = 100 * kMiB;
  job.in.tier_request.device_capacity = job.all_on_device() + 100 * kMiB;
  job.in.tier_request.host_capacity = 120 * kMiB;
  EXPECT_EQ(why(job.plan(), "activations"), "device: auto: 100.00 MiB measured; device has 100.00 MiB left");
  job.in.tier_request.device_capacity -= 1;
  EXPECT_EQ(why(job.plan(), "activations"),
            "cpu: auto: 100.00 MiB measured; device has 100.00 MiB left, cpu has 120.00 MiB left");
  job.in.tier_request.host_capacity = 99 * kMiB;
  EXPECT_EQ(why(job.plan(), "activations"),
            "nvme: auto: 100.00 MiB measured; device has 100.00 MiB left, cpu has 99.00 MiB left, nvme has no budget");
}

TEST(PlacementTest, UnmeasuredActivationsGetAQuarterOfTheDevice) {
  Job job;
  job.in.tier_request.activations = job.in.tier_request.states = plan::kAnyTier;
  job.in.tier_request.device_capacity = 4 * job.all_on_device();
  EXPECT_EQ(job.plan().placement.activations, device);
  EXPECT_EQ(states_on(job.plan(), device), kStates);
  job.in.tier_request.device_capacity = job.all_on_device();
  const plan::MemoryPlan plan = job.plan();
  EXPECT_EQ(plan.placement.activations, device);
  EXPECT_LE(plan.bytes(), job.in.tier_request.device_capacity * 3 / 4) << "states make way";
  // Activations that were measured as 0 bytes reserve nothing.
  job.in.tier_request.activations_known = true;
  EXPECT_EQ(states_on(job.plan(), device), kStates);
}

TEST(PlacementTest, ReportsAnOptimizerWithoutStates) {
  Job job;
  job.in.descriptions[0].slots.clear();
  job.in.tier_request.states = nvme;
  EXPECT_EQ(why(job.plan(), "states"), "device: the optimizer has none");
}

TEST(PlacementTest, CutsOnlyBetweenFullParameters) {
  Job job;
  job.in.tier_request.states = plan::kAnyTier;
  job.in.tier_request.activations_known = true;
  job.in.descriptions[0].granularity = ZR_TENSORWISE;
  job.in.tier_request.device_capacity = job.all_on_device() - kStates + 40 * kMiB;
  job.in.tier_request.host_capacity = 200 * kMiB;
  const plan::MemoryPlan plan = job.plan();
  EXPECT_EQ(states_on(plan, device), kStates / 2);
  EXPECT_EQ(states_on(plan, cpu), kStates / 2);
}

// The device has copies of the weights, 32 MiB.
TEST(PlacementTest, CapacityOfDeviceLimitsOnlyItsOwnMemoryIfStateIsInHostMemory) {
  Job job;
  job.in.tier_request.states = job.in.tier_request.reduced_gradients = job.in.tier_request.activations = plan::kAnyTier;
  job.in.tier_request.state_in_host_memory = job.in.tier_request.activations_known = true;
  job.in.tier_request.activations_on_device = 10 * kMiB;
  for (const int64_t capacity : {41 * kMiB, 42 * kMiB}) {
    job.in.tier_request.device_capacity = capacity;
    const plan::MemoryPlan plan = job.plan();
    EXPECT_EQ(plan.placement.activations, capacity == 42 * kMiB ? device : cpu);
    EXPECT_EQ(plan.placement.reduced_gradients, device);
    EXPECT_EQ(states_on(plan, device), kStates);
    EXPECT_EQ(why(plan, "states"), "device: auto: 64.00 MiB; device has no budget");
  }
}

TEST(PlacementTest, BudgetedBytesAreUnshardedWeightsIfStateIsInHostMemory) {
  Job job;
  plan::MemoryPlan plan = job.plan();
  EXPECT_EQ(plan.budgeted_bytes(), plan.bytes());
  plan.state_location = "on the device";
  plan.on_device = true;
  EXPECT_EQ(plan.max_budgeted_bytes(), plan.max_bytes);
  plan.on_device = false;
  EXPECT_EQ(plan.budgeted_bytes(), 32 * kMiB);
  EXPECT_EQ(plan.max_budgeted_bytes(), 32 * kMiB);
}

}  // namespace
