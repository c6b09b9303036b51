// Memory over a budget: rejected where it is planned, and where it is asked for.
#include "engine/budget_limit.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

struct BudgetLimitFixture {
  explicit BudgetLimitFixture(const std::vector<std::string>& overrides) : rig(overrides) {}
  void add(int64_t bytes) { rig.job.ledger.add(Tier::device, MemoryKind::other, "test", bytes); }
  void add_host(int64_t bytes) { rig.job.ledger.add(Tier::host, MemoryKind::other, "test", bytes); }
  OneRankJob rig;
  engine::TrainingProgress progress{rig.job.config(), 2};
  engine::BudgetLimit budget{rig.context(), nullptr, progress};
};

TEST(BudgetLimitTest, RejectsPlanOverBudget) {
  EXPECT_THAT(failure_of([] { OneRankJob rig({"memory.device_budget=4KiB"}); }), HasSubstr("memory.device_budget"));
  EXPECT_EQ(failure_of([] { OneRankJob rig({"memory.device_budget=64MiB"}); }), "");
}

TEST(BudgetLimitTest, LimitsLibtorchToBytesLeftInBudget) {
  BudgetLimitFixture f({"memory.device_budget=64MiB"});
  const int64_t held = f.rig.job.ledger.held(Tier::device);
  EXPECT_EQ(f.rig.model.limit, 64 * kMiB - held);
  f.add(10 * kMiB);
  EXPECT_EQ(f.rig.model.limit, 54 * kMiB - held);
  f.add(-10 * kMiB);
  EXPECT_EQ(f.rig.model.limit, 64 * kMiB - held);
}

TEST(BudgetLimitTest, RejectsDeviceAllocationOverBudget) {
  BudgetLimitFixture f({"memory.device_budget=64MiB"});
  f.rig.model.held = {30 * kMiB, 30 * kMiB};
  EXPECT_EQ(failure_of([&] { f.add(20 * kMiB); }), "");
  EXPECT_THAT(failure_of([&] { f.add(20 * kMiB); }),
              AllOf(HasSubstr("memory.device_budget is 64"), HasSubstr("rank 0 holds 70"),
                    HasSubstr("in the first step"), HasSubstr("largest: test")));
}

TEST(BudgetLimitTest, ReservedBytesCountAsHeld) {
  BudgetLimitFixture f({"memory.device_budget=64MiB"});
  Ledger& ledger = f.rig.job.ledger;
  const int64_t held = ledger.held(Tier::device);
  ledger.reserve(Tier::device, 10 * kMiB);
  EXPECT_EQ(f.rig.model.limit, 54 * kMiB - held);
  EXPECT_EQ(ledger.held(Tier::device), held);
  f.rig.model.held = {50 * kMiB, 50 * kMiB};
  EXPECT_THAT(failure_of([&] { f.add(5 * kMiB); }),
              AllOf(HasSubstr("rank 0 holds 65"), HasSubstr("  10.00 MiB of it is reserved for later steps\n")));
  f.add(-5 * kMiB);
  EXPECT_EQ(failure_of([&] { ledger.reserve(Tier::device, -10 * kMiB); }), "");
  EXPECT_EQ(failure_of([&] { f.add(10 * kMiB); }), "") << "the reserved bytes";
  EXPECT_EQ(f.rig.model.limit, 54 * kMiB - held);
  EXPECT_NE(failure_of([&] { ledger.reserve(Tier::device, 5 * kMiB); }), "");
}

TEST(BudgetLimitTest, ErrorNamesStepAndBytesThatLibtorchRequests) {
  BudgetLimitFixture f({"memory.device_budget=64MiB"});
  f.progress.restore(4, 4, 4, true);
  ASSERT_TRUE(f.rig.model.over_limit);
  EXPECT_THAT(failure_of([&] { f.rig.model.over_limit(70 * kMiB); }),
              AllOf(HasSubstr("libtorch requests 70"), HasSubstr("in step 5")));
}

TEST(BudgetLimitTest, FreeingNeverFails) {
  BudgetLimitFixture f({"memory.device_budget=64MiB"});
  f.add(20 * kMiB);
  f.rig.model.held = {60 * kMiB, 60 * kMiB};
  EXPECT_EQ(failure_of([&] { f.add(-kMiB); }), "");
  EXPECT_NE(failure_of([&] { f.add(kMiB); }), "");
  EXPECT_EQ(failure_of([&] { f.add(-20 * kMiB); }), "");
}

TEST(BudgetLimitTest, RejectsHostAllocationOverShareOfRank) {
  BudgetLimitFixture f({"memory.host_budget=8MiB"});
  EXPECT_EQ(failure_of([&] { f.add_host(7 * kMiB); }), "");
  EXPECT_THAT(failure_of([&] { f.add_host(2 * kMiB); }),
              AllOf(HasSubstr("memory.host_budget is 8"), HasSubstr("rank 0 holds 9")));
}

TEST(BudgetLimitTest, DoesNothingWithoutBudgetAndAfterDestruction) {
  BudgetLimitFixture none({});
  EXPECT_EQ(none.rig.model.limit, -1);
  EXPECT_EQ(failure_of([&] { none.add(int64_t{1} << 40); }), "");
  OneRankJob rig({"memory.device_budget=64MiB"});
  const engine::TrainingProgress progress(rig.job.config(), 2);
  { const engine::BudgetLimit budget(rig.context(), nullptr, progress); }
  EXPECT_EQ(rig.model.limit, -1);
  EXPECT_EQ(failure_of([&] { rig.job.ledger.add(Tier::device, MemoryKind::other, "test", 100 * kMiB); }), "");
}

// The training state is in host memory, because the model of the test has no memory of the device: the device has the
// weights, 1540 elements.
struct DeviceBudgetFixture {
  explicit DeviceBudgetFixture(bool counted = true) : rig({"job.device=sim", "memory.device_budget=64MiB"}) {
    rig.model.on_device = {kWeights, kWeights, 0, counted};
    budget.emplace(rig.context(), nullptr, progress);
  }
  std::string check(engine::BudgetCheck after, int64_t held, int64_t peak) {
    rig.model.on_device = {held, peak, 0, true};
    return failure_of([&] { budget->check(after); });
  }
  static constexpr int64_t kWeights = 1540 * 4;
  OneRankJob rig;
  engine::TrainingProgress progress{rig.job.config(), 2};
  std::optional<engine::BudgetLimit> budget;
};

TEST(DeviceBudgetTest, LimitsPeakOfLibtorchOnDeviceIfStateIsInHostMemory) {
  DeviceBudgetFixture f;
  EXPECT_EQ(failure_of([&] { f.rig.job.ledger.add(Tier::device, MemoryKind::other, "host", 100 * kMiB); }), "");
  EXPECT_EQ(f.rig.model.limit, -1) << "host memory is not limited";
  EXPECT_EQ(f.check(engine::BudgetCheck::forward, 0, 64 * kMiB), "");
  const std::string start = "memory.device_budget is 64.00 MiB (command line): rank 0 held up to 70.00 MiB on the ",
                    kinds =
                        "  weights      planned     6.02 KiB, held     6.02 KiB\n"
                        "  activations  planned      unknown, held    69.99 MiB\n",
                    none =
                        "no change of strategy, ranks, micro-batch or sizes makes the job fit; raise the budget, or "
                        "train a smaller model",
                    twice = "\n  (activations count twice, because the first step had not ended)";
  EXPECT_EQ(f.check(engine::BudgetCheck::forward, 0, 70 * kMiB),
            start + "device by the end of forward, in the first step\n" + kinds + none + twice);
  EXPECT_EQ(f.check(engine::BudgetCheck::backward, 0, 70 * kMiB),
            start + "device by the end of backward, in the first step\n" + kinds + none);
  f.progress.restore(4, 4, 4, true);
  EXPECT_EQ(f.check(engine::BudgetCheck::forward, 0, 70 * kMiB),
            start + "device by the end of forward, in step 5\n" + kinds + none);
  EXPECT_EQ(f.check(engine::BudgetCheck::step, 0, 70 * kMiB),
            start + "device by the end of engine.step(), in step 4\n" + kinds + none);
}

TEST(DeviceBudgetTest, MemoryOfEnginesIsNotActivations) {
  DeviceBudgetFixture f;
  f.rig.model.on_device = {70 * kMiB, 70 * kMiB, 7 * kMiB, true};
  EXPECT_EQ(failure_of([&] { f.budget->check(engine::BudgetCheck::step); }), "");
}

TEST(DeviceBudgetTest, RejectsDeviceWhoseMemoryIsNotCounted) {
  EXPECT_EQ(
      failure_of([] { DeviceBudgetFixture f(false); }),
      "memory.device_budget is 64.00 MiB (command line), but libtorch's backend for job.device = \"sim\" does not "
      "count its memory; remove memory.device_budget");
}

}  // namespace
}  // namespace zr::testing
