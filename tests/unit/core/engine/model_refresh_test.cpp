// engine.refresh() on one rank: the next session continues with another list of parameters.
#include "engine/model_refresh.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <stdexcept>

#include "engine/session.hpp"
#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;

struct ModelRefreshFixture {
  ModelRefreshFixture()
      : session(std::make_unique<engine::Session>(one_rank_setup(scratch.folder().string(), {}, control), model)) {}
  bool agree(engine::ParameterChange& change) {
    return session->refresh().compare_changes([&](engine::ParameterChange&) { return other.parameters(); }, change);
  }
  static void backward(engine::Session& session, FakeModel& model) {
    session.begin_backward(1, 1);
    for (auto param = static_cast<uint32_t>(model.parameters().size()); param-- > 0;) model.give_gradient(param, 0.5f);
    session.end_backward();
  }
  static std::vector<float> read(engine::Session& session, const std::string& name, state::LogicalTensor role,
                                 const std::string& slot = "") {
    std::vector<float> values(40);
    session.tensors().read(session.tensors().find(name), role, slot, values.data());
    return values;
  }
  static engine::ParameterChange with_c() {
    engine::ParameterChange change;
    change.any = true;
    change.fresh = {"c"};
    change.log = {"'c' is new"};
    return change;
  }
  const test::Scratch scratch;
  const std::shared_ptr<OneRankControl> control = std::make_shared<OneRankControl>();
  FakeModel model{{{"a", 1500}, {"b", 40}}};
  FakeModel other{{{"a", 1500}, {"b", 40}, {"c", 40}}};
  std::unique_ptr<engine::Session> session;
};

TEST(ModelRefreshTest, ReturnsFalseIfNothingChanged) {
  ModelRefreshFixture f;
  engine::ParameterChange change;
  EXPECT_FALSE(f.agree(change));
  change = ModelRefreshFixture::with_c();
  EXPECT_TRUE(f.agree(change));
}

TEST(ModelRefreshTest, RejectsAChangeWithinAStep) {
  ModelRefreshFixture f;
  ModelRefreshFixture::backward(*f.session, f.model);
  engine::ParameterChange change;
  EXPECT_EQ(failure_of([&] { f.agree(change); }),
            "engine.refresh() was called between engine.backward() and the engine.step() that ends its step; call "
            "engine.refresh() after engine.step()");
  EXPECT_TRUE(f.session->step()) << "the step can still be completed";
}

TEST(ModelRefreshTest, ChangesNothingIfTheModelCannotBeRead) {
  ModelRefreshFixture f;
  engine::ParameterChange change;
  EXPECT_THROW(
      f.session->refresh().compare_changes(
          [](engine::ParameterChange&) -> std::vector<plan::Parameter> { throw std::range_error("no model"); }, change),
      std::range_error);
  ModelRefreshFixture::backward(*f.session, f.model);
  EXPECT_TRUE(f.session->step());
}

TEST(ModelRefreshTest, NextSessionContinuesStepWeightsAndStates) {
  ModelRefreshFixture f;
  ModelRefreshFixture::backward(*f.session, f.model);
  f.session->step();
  const std::vector<float> weights = ModelRefreshFixture::read(*f.session, "b", state::LogicalTensor::value);
  const std::vector<float> states = ModelRefreshFixture::read(*f.session, "b", state::LogicalTensor::state, "exp_avg");
  auto before = std::make_unique<engine::RefreshState>(f.session->hand_over(ModelRefreshFixture::with_c()));
  const std::string saved = before->folder;
  EXPECT_TRUE(std::filesystem::exists(saved));
  f.session.reset();
  engine::Session next(one_rank_setup(f.scratch.folder().string(), {}, f.control), f.other, std::move(before));
  EXPECT_FALSE(std::filesystem::exists(saved)) << "the checkpoint between the sessions is deleted";
  EXPECT_EQ(next.progress().step(), 1);
  EXPECT_EQ(next.progress().steps_of_run(), 1);
  EXPECT_EQ(next.progress().param_steps(), (std::vector<int64_t>{1, 1, 0}));
  EXPECT_EQ(ModelRefreshFixture::read(next, "b", state::LogicalTensor::value), weights);
  EXPECT_EQ(ModelRefreshFixture::read(next, "b", state::LogicalTensor::state, "exp_avg"), states);
  EXPECT_EQ(ModelRefreshFixture::read(next, "c", state::LogicalTensor::value), FakeModel::initial(40));
  EXPECT_EQ(ModelRefreshFixture::read(next, "c", state::LogicalTensor::state, "exp_avg"), std::vector<float>(40, 0));
  ModelRefreshFixture::backward(next, f.other);
  EXPECT_TRUE(next.step());
  EXPECT_EQ(next.progress().step(), 2);
}

}  // namespace
}  // namespace zr::testing
