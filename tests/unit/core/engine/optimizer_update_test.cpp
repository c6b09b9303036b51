// The learning rate of an update, and gradients that the program edits, on one rank.
#include "engine/optimizer_update.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;

struct OptimizerUpdateFixture {
  explicit OptimizerUpdateFixture(const std::vector<std::string>& overrides = {}) : rig(overrides) {}
  OneRankJob rig;
  state::ShardedState state{rig.context(), rig.job.host, rig.job.plugins.tiers, nullptr};
  engine::OptimizerUpdate update{rig.context(), state};
};

// The job's optimizer, which records where the weights and gradients of its slices are.
struct RecordingOptimizer {
  explicit RecordingOptimizer(job::Setup& setup)
      : component(*setup.optimizer.table), api(*static_cast<const zr_optimizer_api*>(component.api)) {
    seen.clear();
    real = api.step;
    api.step = [](void* self, const zr_step* step, const zr_update_slice* const* slices, uint32_t count,
                  zr_stream* stream, zr_done* done, zr_error* error) -> zr_code {
      for (uint32_t i = 0; i < count; ++i) seen.emplace_back(slices[i]->weight.data, slices[i]->grad.data);
      return real(self, step, slices, count, stream, done, error);
    };
    component.api = &api;
    setup.optimizer.table = &component;
  }
  static inline std::vector<std::pair<const void*, const void*>> seen;
  static inline decltype(zr_optimizer_api::step) real = nullptr;
  zr_component component;
  zr_optimizer_api api;
};

TEST(OptimizerUpdateTest, StatesInHostMemoryAreUpdatedWithTheWeightsAndGradientsThemselves) {
  const test::Scratch scratch;
  FakeModel model{{{"a", 1500}, {"b", 40}}};
  job::Setup setup =
      one_rank_setup(scratch.folder().string(), {"offload.optimizer=cpu"}, std::make_shared<OneRankControl>());
  const RecordingOptimizer optimizer(setup);
  job::StartedJob job(std::move(setup), model, nullptr);
  state::ShardedState state(job.context, job.host, job.plugins.tiers, nullptr);
  const std::vector<int64_t> steps{1, 1};
  const std::vector<double> rates{0.5, 0.5};
  const std::vector<char> touched{1, 1};
  std::vector<std::pair<const void*, const void*>> expected;
  for (const update::UpdateSlice& slice : state.slices()) expected.emplace_back(slice.weight.data, slice.grad.data);
  state.for_each_slice_in_memory(touched, {}, [&](const std::vector<update::UpdateSlice>& slices) {
    update::update({{&job.context.optimizers[0], nullptr}}, job.context.pool, job.context.plan, slices,
                   {1, 1, 0, &steps, &rates, &touched});
  });
  EXPECT_EQ(RecordingOptimizer::seen, expected);
}

TEST(OptimizerUpdateTest, LearningRateFollowsTheConfiguration) {
  const OptimizerUpdateFixture f({"optimizer.lr=0.5", "schedule.use=linear", "train.steps=4"});
  EXPECT_EQ(f.update.learning_rate(0), 0.5);
  EXPECT_EQ(f.update.learning_rate(2), 0.25);
}

TEST(OptimizerUpdateTest, LearningRateComesFromTheScheduleOfTheProgram) {
  OptimizerUpdateFixture f({"optimizer.lr=0.5"});
  f.update.set_schedule([](int64_t index) { return 0.125 * static_cast<double>(index + 1); });
  EXPECT_EQ(f.update.learning_rate(0), 0.125);
  EXPECT_EQ(f.update.learning_rate(7), 1.0);
  f.update.set_schedule({});
  EXPECT_EQ(f.update.learning_rate(7), 0.5);
}

TEST(OptimizerUpdateTest, RejectsALearningRateThatIsNegativeOrNotFinite) {
  OptimizerUpdateFixture f;
  for (const auto& [rate, text] :
       {std::pair{-1.0, "-1"}, std::pair{std::nan(""), "nan"}, std::pair<double, const char*>{INFINITY, "inf"}}) {
    f.update.set_schedule([rate = rate](int64_t) { return rate; });
    EXPECT_EQ(failure_of([&] { f.update.learning_rate(3); }),
              std::string("engine.step(): the learning rate of update 3, which the program set, is ") + text +
                  " on rank 0, but it must be finite and at least 0; correct engine.set_lr() or engine.set_schedule()");
  }
}

TEST(OptimizerUpdateTest, ThrowsTheExceptionOfTheSchedule) {
  OptimizerUpdateFixture f;
  f.update.set_schedule([](int64_t) -> double { throw std::range_error("no rate"); });
  EXPECT_THROW(f.update.learning_rate(0), std::range_error);
}

TEST(OptimizerUpdateTest, AveragesAndEditsGradientsOfTouchedParametersOnly) {
  OptimizerUpdateFixture f;
  for (const update::UpdateSlice& slice : f.state.slices())
    std::fill_n(static_cast<float*>(slice.grad.data), slice.grad.count, 6.0f);
  std::vector<int> calls(1500, 0);
  EXPECT_FALSE(f.update.edits_gradients());
  f.update.set_gradient_edit([&](uint32_t param, int64_t first, int64_t count, float* values) {
    EXPECT_EQ(param, 0u);
    for (int64_t i = 0; i < count; ++i) {
      ++calls[static_cast<std::size_t>(first + i)];
      values[i] += static_cast<float>(first + i);
    }
  });
  EXPECT_TRUE(f.update.edits_gradients());
  f.update.edit_gradients(4, {1, 0});
  EXPECT_EQ(calls, std::vector<int>(1500, 1)) << "each element once";
  for (const update::UpdateSlice& slice : f.state.slices())
    for (int64_t i = 0; i < slice.grad.count; ++i)
      ASSERT_EQ(static_cast<const float*>(slice.grad.data)[i],
                slice.param == 0 ? 1.5f + static_cast<float>(slice.first + i) : 6.0f);
}

TEST(OptimizerUpdateTest, DoesNotEditGradientsThatAreNotFinite) {
  OptimizerUpdateFixture f;
  for (const update::UpdateSlice& slice : f.state.slices())
    std::fill_n(static_cast<float*>(slice.grad.data), slice.grad.count, slice.param == 1 ? INFINITY : 6.0f);
  std::vector<uint32_t> edited;
  f.update.set_gradient_edit([&](uint32_t param, int64_t, int64_t, float*) { edited.push_back(param); });
  f.update.edit_gradients(2, {1, 1});
  EXPECT_EQ(std::count(edited.begin(), edited.end(), 1u), 0) << "the step will be skipped";
  EXPECT_GT(std::count(edited.begin(), edited.end(), 0u), 0);
}

}  // namespace
}  // namespace zr::testing
