// Writes of the program to weights: the masters follow, and a write that a checkpoint missed is logged.
#include "engine/weight_monitor.hpp"

#include <gtest/gtest.h>

#include "unit/core/one_rank.hpp"
#include "update/cast.hpp"

namespace zr::testing {
namespace {

using namespace host;

// bf16 weights with fp32 masters.
struct WeightMonitorFixture {
  void write(uint32_t param, float value) {
    const std::vector<float> values(static_cast<std::size_t>(rig.model.parameters()[param].count), value);
    update::downcast(values.data(), std::ssize(values), ZR_BF16, rig.model.memory[param]);
  }
  std::vector<float> master(uint32_t param) {
    return full_tensor(state, rig.model, param, state::LogicalTensor::value);
  }
  std::string logged(const std::function<void()>& call) {
    ::testing::internal::CaptureStderr();
    call();
    return ::testing::internal::GetCapturedStderr();
  }
  OneRankJob rig{{"train.dtype=bf16"}};
  state::ShardedState state{rig.context(), rig.job.host, rig.job.plugins.tiers, nullptr};
  engine::WeightFlow flow{rig.context(), state};
  run::RunLog log{rig.job.config(), "", 1, 0};
  engine::StepTimer steps{rig.context(), state, log, nullptr, nullptr};
  engine::TrainingProgress progress{rig.job.config(), 2};
  engine::WeightMonitor monitor{rig.context(), {state, flow, log, steps, progress}};
};

TEST(WeightMonitorTest, MasterFollowsWriteThatModelReports) {
  WeightMonitorFixture f;
  EXPECT_EQ(f.monitor.written_parameter(), std::nullopt);
  f.write(1, 3);
  f.rig.model.written_to = {1};
  f.monitor.collect_writes();
  EXPECT_EQ(f.master(1), std::vector<float>(40, 3));
  EXPECT_EQ(f.master(0), FakeModel::initial(1500));
  EXPECT_EQ(f.monitor.written_parameter(), std::nullopt);
}

TEST(WeightMonitorTest, MasterFollowsWriteThatModelDoesNotReport) {
  WeightMonitorFixture f;
  f.write(1, 3);
  EXPECT_EQ(f.monitor.written_parameter(), std::optional<uint32_t>(1));
  f.monitor.collect_writes();
  EXPECT_EQ(f.master(1), std::vector<float>(40, 3));
  EXPECT_EQ(f.monitor.written_parameter(), std::nullopt);
}

TEST(WeightMonitorTest, LogsTheFirstWriteAfterACheckpointOnce) {
  WeightMonitorFixture f;
  f.monitor.hash_saved_weights();
  f.write(1, 3);
  f.rig.model.written_to = {1};
  EXPECT_EQ(
      f.logged([&] { f.monitor.collect_writes(); }),
      "zeroth: warning: the program wrote to weights ('b') after the checkpoint of step 0 was saved, so the "
      "checkpoint does not contain the new values: checkpoint.every saves at the end of engine.step(); to include "
      "such writes, call engine.save() after them instead\n");
  f.monitor.hash_saved_weights();
  f.write(0, 4);
  f.rig.model.written_to = {0};
  EXPECT_EQ(f.logged([&] { f.monitor.collect_writes(); }), "") << "once per session";
}

TEST(WeightMonitorTest, DoesNotLogAWriteOfTheSameValues) {
  WeightMonitorFixture f;
  f.monitor.hash_saved_weights();
  f.rig.model.written_to = {1};
  EXPECT_EQ(f.logged([&] { f.monitor.collect_writes(); }), "");
}

TEST(WeightMonitorTest, DoesNotLogAWriteAfterTheNextStep) {
  WeightMonitorFixture f;
  f.monitor.hash_saved_weights();
  f.monitor.clear_saved_hashes();
  f.write(1, 3);
  f.rig.model.written_to = {1};
  EXPECT_EQ(f.logged([&] { f.monitor.collect_writes(); }), "");
}

}  // namespace
}  // namespace zr::testing
