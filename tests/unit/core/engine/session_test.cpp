// The order of a step, on one rank without a process: what updates weights, what is rejected, and what is left at the
// end.
#include "engine/session.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct SessionFixture {
  explicit SessionFixture(const std::vector<std::string>& overrides = {}) {
    session = std::make_unique<engine::Session>(one_rank_setup(scratch.folder().string(), overrides, control), model);
  }
  void backward(float gradient, double weight = 1) {
    session->begin_backward(0.5, weight);
    for (const uint32_t param : {1u, 0u}) model.give_gradient(param, gradient);
    session->end_backward();
  }
  bool step(float gradient) {
    backward(gradient);
    return session->step();
  }
  std::vector<float> read(uint32_t param, state::LogicalTensor role = state::LogicalTensor::value) {
    std::vector<float> values(static_cast<std::size_t>(model.parameters()[param].count));
    session->tensors().read(param, role, "", values.data());
    return values;
  }
  const test::Scratch scratch;
  const std::shared_ptr<OneRankControl> control = std::make_shared<OneRankControl>();
  FakeModel model{{{"a", 1500}, {"b", 40}}};
  std::unique_ptr<engine::Session> session;
};

TEST(SessionTest, UpdatesWeightsOnTheBoundaryOnly) {
  SessionFixture f({"train.gradient_accumulation=2", "optimizer.lr=0.5"});
  EXPECT_FALSE(f.step(1));
  EXPECT_EQ(f.read(1), FakeModel::initial(40));
  EXPECT_TRUE(f.step(3));
  EXPECT_NE(f.read(1), FakeModel::initial(40));
  EXPECT_EQ(f.read(1, state::LogicalTensor::gradient), std::vector<float>(40, 2)) << "the mean of the micro-batches";
  EXPECT_EQ(f.session->progress().loss(), 0.5);
  EXPECT_NEAR(f.session->progress().grad_norm(), 2 * std::sqrt(1540.0), 1e-9);
}

TEST(SessionTest, ClipsTheGradientToItsNorm) {
  SessionFixture f({"train.gradient_clipping=1.0"});
  f.step(3);
  const double norm = 3 * std::sqrt(1540.0);
  EXPECT_NEAR(f.session->progress().grad_norm(), norm, 1e-9);
  EXPECT_FLOAT_EQ(f.read(1, state::LogicalTensor::gradient)[0], static_cast<float>(3 / (norm + 1e-6)));
}

TEST(SessionTest, SkipsAStepWhoseGradientsAreNotFinite) {
  SessionFixture f;
  EXPECT_TRUE(f.step(INFINITY));
  EXPECT_EQ(f.read(0), FakeModel::initial(1500));
  EXPECT_EQ(f.session->progress().step(), 1);
  EXPECT_EQ(f.session->progress().updates(), 0);
  EXPECT_FALSE(f.session->progress().last_step_applied());
}

TEST(SessionTest, GivesUpAfterTooManySkippedStepsAndNamesTheParameter) {
  SessionFixture f({"train.max_skipped_steps=2"});
  f.step(NAN);
  EXPECT_THAT(failure_of([&] { f.step(NAN); }),
              AllOf(HasSubstr("gradients were not finite in 2 steps in a row"),
                    HasSubstr("'a' was the first parameter that overflowed, on rank 0")));
}

TEST(SessionTest, RejectsAStepInWhichNoParameterHasAGradient) {
  SessionFixture f;
  f.session->begin_backward(1, 1);
  f.session->end_backward();
  EXPECT_THAT(failure_of([&] { f.session->step(); }), HasSubstr("in step 1, no parameter of this engine's model"));
  EXPECT_EQ(f.session->progress().step(), 0);
  EXPECT_TRUE(f.step(1)) << "the next backward begins the same step again";
  EXPECT_EQ(f.session->progress().step(), 1);
}

TEST(SessionTest, RejectsAStepOfWeightZeroAndBeginsItAgain) {
  SessionFixture f;
  f.backward(1, 0);
  EXPECT_THAT(failure_of([&] { f.session->step(); }), HasSubstr("add up to 0"));
  EXPECT_EQ(f.read(0), FakeModel::initial(1500));
  EXPECT_TRUE(f.step(1));
}

TEST(SessionTest, RepeatsABackwardThatFailedBeforeItsFirstGradient) {
  SessionFixture f;
  f.session->begin_backward(1, 1);
  f.session->fail_backward();
  EXPECT_FALSE(f.session->progress().within_step());
  EXPECT_TRUE(f.step(1));
}

TEST(SessionTest, RejectsBackwardAfterOneThatFailedHalfway) {
  SessionFixture f;
  f.session->begin_backward(1, 1);
  f.model.give_gradient(1, 1);
  f.session->fail_backward();
  EXPECT_THAT(failure_of([&] { f.session->begin_backward(1, 1); }), HasSubstr("its gradients are incomplete"));
}

TEST(SessionTest, ChangesTheNumberOfMicroBatchesBetweenSteps) {
  SessionFixture f({"train.gradient_accumulation=2"});
  f.session->set_accumulation(1);
  EXPECT_TRUE(f.step(1));
  f.session->set_accumulation(3);
  EXPECT_FALSE(f.step(1));
  EXPECT_THROW(f.session->set_accumulation(2), UserError) << "within a step";
  EXPECT_FALSE(f.step(2));
  EXPECT_TRUE(f.step(6));
  EXPECT_EQ(f.read(1, state::LogicalTensor::gradient), std::vector<float>(40, 3)) << "the mean of three";
}

TEST(SessionTest, RejectsMoreMicroBatchesThanThePlanHasSumsFor) {
  SessionFixture f;
  EXPECT_THROW(f.session->set_accumulation(0), UserError);
  EXPECT_THROW(f.session->set_accumulation(2), UserError);
  EXPECT_TRUE(f.step(1));
}

TEST(SessionTest, AcceptsMoreMicroBatchesThanPlannedIfOnlyTheLastOneReduces) {
  SessionFixture f({"gradients.reduce=last_micro_step"});
  f.session->set_accumulation(2);
  EXPECT_FALSE(f.step(1));
  EXPECT_TRUE(f.step(3));
  EXPECT_EQ(f.read(1, state::LogicalTensor::gradient), std::vector<float>(40, 2)) << "the mean of two";
}

TEST(SessionTest, SetsAndHashesWeightsByName) {
  SessionFixture f;
  const std::string before = f.session->tensors().weights_hash();
  EXPECT_EQ(before.size(), 16u);
  const std::vector<float> values(40, 3);
  const uint32_t param = f.session->tensors().find("b");
  f.session->tensors().write(param, state::LogicalTensor::value, "", values.data());
  EXPECT_EQ(f.read(param), values);
  EXPECT_NE(f.session->tensors().weights_hash(), before);
  EXPECT_THAT(failure_of([&] { f.session->tensors().find("bb"); }), HasSubstr("did you mean 'b'?"));
}

TEST(SessionTest, DestructionReleasesModelAndLeavesJob) {
  SessionFixture f;
  f.step(1);
  f.session.reset();
  EXPECT_EQ(f.model.released, 1);
  EXPECT_FALSE(f.model.arrived);
  EXPECT_FALSE(f.model.uses.begin);
  EXPECT_EQ(f.control->left, (std::pair<int64_t, bool>{1, false}));
}

TEST(SessionTest, FailedStartReleasesTheModelAndTheRunFolder) {
  SessionFixture f({"job.name=other"});
  FakeModel model({{"a", 1500}, {"b", 40}});
  const auto start = [&](const std::vector<std::string>& overrides) {
    const engine::Session session(one_rank_setup(f.scratch.folder().string(), overrides, f.control), model);
  };
  EXPECT_NE(failure_of([&] { start({"checkpoint.init=" + f.scratch.path("nothing")}); }), "");
  EXPECT_EQ(model.released, 1);
  EXPECT_FALSE(model.arrived);
  EXPECT_EQ(f.control->left.first, -1) << "a job that did not start is not left";
  EXPECT_EQ(failure_of([&] { start({}); }), "");
}

// The real strategy, whose grads_finish fails on request.
struct FailingFinish {
  explicit FailingFinish(job::Setup& setup)
      : component(*setup.strategy.table), api(*static_cast<const zr_strategy_api*>(component.api)) {
    real = api.grads_finish;
    api.grads_finish = [](void* self, const zr_use* use, zr_error* error) -> zr_code {
      return fails ? fill_error(error, ZR_INTERNAL, "on purpose") : real(self, use, error);
    };
    component.api = &api;
    setup.strategy.table = &component;
  }
  static inline bool fails = false;
  static inline decltype(zr_strategy_api::grads_finish) real = nullptr;
  zr_component component;
  zr_strategy_api api;
};

// A micro-step in which both parameters, "a" and "b", get a gradient.
void backward(engine::Session& session, FakeModel& model) {
  session.begin_backward(0.5, 1);
  for (const uint32_t param : {1u, 0u}) model.give_gradient(param, 2);
  session.end_backward();
}

// The second step fails while a part of its update, which began in backward, may still run.
TEST(SessionTest, AFailedStepEndsTrainingIfItsUpdateHasBegun) {
  for (const std::string tier : {"cpu", "nvme"}) {
    const test::Scratch scratch;
    const std::string folder = scratch.folder().string();
    FakeModel model{{{"a", int64_t{1} << 21}, {"b", 40}}};
    job::Setup setup =
        one_rank_setup(folder, {"offload.optimizer=" + tier, "train.nonfinite=stop", "offload.nvme.path=" + folder},
                       std::make_shared<OneRankControl>());
    FailingFinish strategy(setup);
    engine::Session session(std::move(setup), model);
    backward(session, model);
    session.step();
    backward(session, model);
    FailingFinish::fails = true;
    EXPECT_THAT(failure_of([&] { session.step(); }), HasSubstr("on purpose")) << tier;
    FailingFinish::fails = false;
    EXPECT_EQ(failure_of([&] { session.step(); }),
              "training stopped in step 2, because engine.step() failed after a part of the update had run during "
              "backward; resume from the last checkpoint")
        << tier;
  }
}

// The real optimizer, which fails at the call that sets `calls` to 0.
struct FailingOptimizer {
  explicit FailingOptimizer(job::Setup& setup)
      : component(*setup.optimizer.table), api(*static_cast<const zr_optimizer_api*>(component.api)) {
    calls = -1;
    real = api.step;
    api.step = [](void* self, const zr_step* step, const zr_update_slice* const* slices, uint32_t count,
                  zr_stream* stream, zr_done* done, zr_error* error) -> zr_code {
      if (calls >= 0 && calls-- == 0) return fill_error(error, ZR_INTERNAL, "on purpose");
      return real(self, step, slices, count, stream, done, error);
    };
    component.api = &api;
    setup.optimizer.table = &component;
  }
  static inline std::atomic<int> calls{-1};  // before it fails; negative: it does not fail
  static inline decltype(zr_optimizer_api::step) real = nullptr;
  zr_component component;
  zr_optimizer_api api;
};

// Whether updates begin early, how often the optimizer is called before the call of the second step that fails, and
// what ends training.
struct FailingJob {
  const char* name;
  std::vector<std::string> keys;
  int calls;
  const char* reason;
};

class FailedUpdateTest : public ::testing::TestWithParam<FailingJob> {};

TEST_P(FailedUpdateTest, EndsTraining) {
  const test::Scratch scratch;
  FakeModel model({{"a", 1500}, {"b", 40}});
  job::Setup setup = one_rank_setup(scratch.folder().string(), GetParam().keys, std::make_shared<OneRankControl>());
  const FailingOptimizer optimizer(setup);
  engine::Session session(std::move(setup), model);
  backward(session, model);
  session.step();
  FailingOptimizer::calls = GetParam().calls;
  backward(session, model);
  EXPECT_THAT(failure_of([&] { session.step(); }), HasSubstr("on purpose"));
  EXPECT_EQ(FailingOptimizer::calls, -1);
  const std::string text =
      std::string("training stopped in step 2, because ") + GetParam().reason + "; resume from the last checkpoint";
  EXPECT_EQ(failure_of([&] { session.step(); }), text);
  EXPECT_EQ(failure_of([&] { session.begin_backward(0.5, 1); }), text);
  EXPECT_EQ(session.progress().step(), 1);
}

const char* const kInStep = "engine.step() failed during the update of the weights";
INSTANTIATE_TEST_SUITE_P(
    Update, FailedUpdateTest,
    ::testing::Values(
        FailingJob{"OnTheDevice", {}, 0, kInStep}, FailingJob{"AfterAPart", {}, 1, kInStep},
        FailingJob{"AfterBackward", {"offload.optimizer=cpu", "offload.overlap=false"}, 0, kInStep},
        FailingJob{"Early", {"offload.optimizer=cpu", "train.nonfinite=stop"}, 0, "its update failed on rank 0"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace zr::testing
