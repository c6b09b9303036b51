// The memory of steps with local gradients, and which rank serves which elements.
#include "plan/local_gradients.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/draft_abi.hpp"
#include "base/text.hpp"
#include "plan/plan.hpp"

namespace {

using namespace zr::host;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// What an exchange plan was asked for.
struct Request {
  std::vector<int64_t> counts, served;
  int world = 0;
};

// A plan of parameters of 5000, 40 (frozen), 0 and 1500 elements. sharded: rank 0 owns the first parameter, rank 1 the
// last one.
class LocalPlanTest : public ::testing::Test {
 protected:
  plan::MemoryPlan plan_of(int rank, bool sharded, bool shared) {
    plan::MemoryPlan plan;
    plan.input.world = 2;
    plan.input.parameters = {
        {"a", {}, {5000}, 5000}, {"b", {}, {40}, 40, true}, {"c", {}, {0}, 0}, {"d", {}, {1500}, 1500}};
    plan::OptimizerDescription& description = plan.input.descriptions[0];
    description.needs = ZR_OPT_NEEDS_LOCAL_GRADS;
    description.slots = {{"m", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0},
                         {"v", ZR_F32, ZR_SLOT_LIKE_PARAM, ZR_SLOT_UNSHARDED, 0}};
    description.private_slots = {{"own", ZR_F32, ZR_SLOT_LIKE_PARAM, ZR_SLOT_RANK_PRIVATE | ZR_SLOT_UNSHARDED, 0},
                                 {"served", ZR_F32, ZR_SLOT_LIKE_PARAM, ZR_SLOT_RANK_PRIVATE, 0}};
    plan.input.exchange_plan = [this](const std::vector<int64_t>& counts, const std::vector<int64_t>& served,
                                      int world) {
      asked = {counts, served, world};
      return plan::ExchangeSizes{77, 99};
    };
    plan.rank = rank;
    plan.has_master = true;
    plan.rank_plan.buffers = {{ZR_ROLE_WEIGHT, "weights", 6656, ZR_BF16, shared},
                              {ZR_ROLE_REDUCED_GRAD, "sums", 6656, ZR_F32}};
    plan.rank_plan.weights = {{0, 0, 0, 5000, 0}, {1, 0, 0, 40, 5056}, {3, 0, 0, 1500, 5120}};
    if (!sharded || rank == 0) plan.rank_plan.reduced_gradients.push_back({0, 1, 0, 5000, 0});
    if (!sharded || rank == 1) plan.rank_plan.reduced_gradients.push_back({3, 1, 0, 1500, 5024});
    const std::vector<int> all{0, 1};
    plan.segments = {
        {{0, 5000, sharded ? std::vector{0} : all}}, {{0, 40, all}}, {}, {{0, 1500, sharded ? std::vector{1} : all}}};
    return plan;
  }
  static std::vector<std::string> ranges_of(const plan::LocalPlan& local) {
    std::vector<std::string> list;
    for (std::size_t i = 0; i < local.ranges.size(); ++i)
      for (const plan::ServedRange& range : local.ranges[i])
        list.push_back(std::to_string(i) + ":" + std::to_string(range.first) + "+" + std::to_string(range.count) + "@" +
                       std::to_string(range.rank));
    return list;
  }
  static std::vector<std::string> arrays_of(const plan::LocalPlan& local) {
    std::vector<std::string> list;
    for (const plan::LocalArray& array : local.arrays) list.push_back(array.tag + " " + std::to_string(array.elements));
    return list;
  }
  Request asked;
};

TEST_F(LocalPlanTest, RanksWithAllStatesServeEqualRunsOfNormBlocks) {
  const plan::LocalPlan local = local_plan(plan_of(1, false, false));
  EXPECT_THAT(ranges_of(local), ElementsAre("0:0+3072@0", "0:3072+1928@1", "3:0+1500@1"));
  EXPECT_THAT(arrays_of(local),
              ElementsAre("local gradients 6528", "own, own 6528", "served, own 3456", "compressed messages 77"));
  EXPECT_FALSE(local.has_replicas);
  EXPECT_THAT(asked.counts, ElementsAre(5000, 1500));
  EXPECT_THAT(asked.served, ElementsAre(1928, 1500));
  EXPECT_EQ(asked.world, 2);
  EXPECT_EQ(local.private_arrays, 2u);
}

TEST_F(LocalPlanTest, OwnersServeAndCopyWhatOtherRanksOwn) {
  const plan::LocalPlan local = local_plan(plan_of(0, true, false));
  EXPECT_THAT(ranges_of(local), ElementsAre("0:0+5000@0", "3:0+1500@1"));
  EXPECT_THAT(arrays_of(local), ElementsAre("local gradients 6528", "own, own 6528", "served, own 5024",
                                            "fp32 master weights, all 6528", "v, all 6528", "compressed messages 77"));
  EXPECT_TRUE(local.has_replicas);
}

// Both ranks must have the same ranges and arrays: they gather the copies together.
TEST_F(LocalPlanTest, RanksAgreeIfOneOwnsAllElements) {
  std::vector<plan::LocalPlan> locals;
  for (const int rank : {0, 1}) {
    plan::MemoryPlan plan = plan_of(rank, true, false);
    plan.rank_plan.reduced_gradients.clear();
    if (rank == 1) plan.rank_plan.reduced_gradients = {{0, 1, 0, 5000, 0}, {3, 1, 0, 1500, 5024}};
    plan.segments[0][0].owners = {1};
    locals.push_back(local_plan(plan));
  }
  EXPECT_THAT(ranges_of(locals[0]), ElementsAre("0:0+5000@1", "3:0+1500@1"));
  EXPECT_EQ(ranges_of(locals[1]), ranges_of(locals[0]));
  for (const plan::LocalPlan& local : locals) EXPECT_TRUE(local.has_replicas);
}

TEST_F(LocalPlanTest, SharedWeightsNeedNoCopies) {
  const plan::LocalPlan local = local_plan(plan_of(1, true, true));
  EXPECT_FALSE(local.has_replicas);
  EXPECT_THAT(arrays_of(local),
              ElementsAre("local gradients 6528", "own, own 6528", "served, own 1504", "compressed messages 77"));
}

// Masters, and the state that steps with local gradients only read, once per host: each rank counts its part.
TEST_F(LocalPlanTest, RanksOfAHostCountSharedMastersAndStatesOnce) {
  int64_t counted = 0;
  for (const int rank : {0, 1}) {
    plan::MemoryPlan plan = plan_of(rank, true, false);
    const int64_t without = plan.bytes();
    plan.input.share_states = true;
    const plan::LocalPlan local = local_plan(plan);
    for (const plan::LocalArray& array : local.arrays) {
      EXPECT_EQ(array.shared, array.tag == "v, all" || array.tag == "fp32 master weights, all") << array.tag;
      EXPECT_EQ(array.counted, array.shared ? 6528 / 2 : array.elements) << array.tag;
      if (array.shared) counted += array.counted;
    }
    EXPECT_EQ(plan.bytes(), without - 2 * 4 * 6528 / 2);
    plan.input.hosts = {1, 1};
    EXPECT_EQ(plan.bytes(), without) << "each host has one rank";
  }
  EXPECT_EQ(counted, 2 * 6528);
}

TEST_F(LocalPlanTest, TextHasTheBytesBeforeAndAfterTheFirstStepWithLocalGradients) {
  const plan::MemoryPlan plan = plan_of(0, true, true);
  const int64_t local = 4 * (6528 + 6528 + 5024) + 77;
  EXPECT_EQ(plan.local_bytes(), local);
  const std::string text = plan.text("plan", {});
  EXPECT_THAT(text, HasSubstr("total          without activations"));
  EXPECT_THAT(text, ContainsRegex("total          before local gradients +" + bytes_text(plan.bytes() - local) + "\n"));
  plan::MemoryPlan without = plan;
  without.input.exchange_plan = {};
  EXPECT_EQ(without.local_bytes(), 0);
  EXPECT_EQ(without.bytes(), plan.bytes() - local);
  EXPECT_THAT(without.text("plan", {}), Not(HasSubstr("before local gradients")));
}

TEST_F(LocalPlanTest, CountsAreThoseOfThePlan) {
  const plan::MemoryPlan plan = plan_of(0, true, false);
  EXPECT_EQ(plan.communication().local, 99);
  plan::MemoryPlan without = plan;
  without.input.exchange_plan = {};
  EXPECT_TRUE(local_plan(without).arrays.empty());
  EXPECT_EQ(plan.bytes_by_kind().at(MemoryKind::buckets), 77);
}

}  // namespace
