// Checkpoints of a session of one rank: what is saved comes back.
#include "engine/checkpointer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "engine/session.hpp"
#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;
using ::testing::HasSubstr;

// A session on the parameters "a" and "b", or others.
class Trained {
 public:
  explicit Trained(const std::string& folder, const std::vector<std::string>& overrides = {},
                   std::vector<std::pair<std::string, int64_t>> parameters = {{"a", 1500}, {"b", 40}})
      : model(std::move(parameters)),
        session(one_rank_setup(folder, overrides, std::make_shared<OneRankControl>()), model) {}
  void step(float gradient) {
    session.begin_backward(1, 1);
    for (auto param = static_cast<uint32_t>(model.parameters().size()); param-- > 0;)
      model.give_gradient(param, gradient);
    session.end_backward();
    ASSERT_TRUE(session.step());
  }
  std::vector<float> read(uint32_t param, state::LogicalTensor role = state::LogicalTensor::value,
                          const std::string& slot = "") {
    std::vector<float> values(static_cast<std::size_t>(model.parameters()[param].count));
    session.tensors().read(param, role, slot, values.data());
    return values;
  }
  engine::Checkpointer& checkpoints() { return session.checkpointer(); }

  FakeModel model;
  engine::Session session;
};

class CheckpointerTest : public ::testing::Test {
 protected:
  std::string root(const std::string& name = "c") const { return (scratch_.folder() / name).string(); }
  std::string runs(const std::string& name) const { return (scratch_.folder() / "runs" / name).string(); }
  std::string in_root() const { return "checkpoint.dir=" + root(); }

 private:
  const test::Scratch scratch_;
};

TEST_F(CheckpointerTest, LoadRestoresSavedState) {
  Trained first(runs("1"));
  first.step(0.5f);
  first.step(-1);
  first.model.statistics = {7, 8, 9};
  const std::string folder = first.checkpoints().save(root(), 0, false);
  EXPECT_EQ(std::filesystem::path(folder).parent_path(), root());
  Trained second(runs("2"));
  const engine::CheckpointLoadReport report = second.checkpoints().load(root(), {});
  EXPECT_EQ(report.folder, folder);
  EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
  for (const uint32_t param : {0u, 1u}) {
    EXPECT_EQ(second.read(param), first.read(param));
    EXPECT_EQ(second.read(param, state::LogicalTensor::state, "exp_avg"),
              first.read(param, state::LogicalTensor::state, "exp_avg"));
  }
  EXPECT_EQ(second.model.statistics, (std::vector<float>{7, 8, 9}));
  EXPECT_EQ(second.session.progress().step(), 2);
  EXPECT_EQ(second.session.progress().updates(), 2);
  EXPECT_EQ(second.session.progress().samples(), 2);
  EXPECT_EQ(second.session.progress().param_steps(), (std::vector<int64_t>{2, 2}));
  first.step(0.25f);
  second.step(0.25f);
  EXPECT_EQ(second.read(0), first.read(0)) << "the next step is the same, to the bit";
}

TEST_F(CheckpointerTest, WeightsOnlyLoadRestoresNeitherStatesNorStep) {
  Trained first(runs("1"));
  first.step(0.5f);
  first.checkpoints().save(root(), 0, false);
  Trained second(runs("2"));
  second.step(3);
  second.checkpoints().load(root(), {.weights_only = true});
  EXPECT_EQ(second.read(0), first.read(0));
  EXPECT_EQ(second.read(0, state::LogicalTensor::state, "exp_avg"), std::vector<float>(1500, 0));
  EXPECT_EQ(second.session.progress().param_steps(), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(second.session.progress().step(), 1) << "its own";
}

TEST_F(CheckpointerTest, AsyncSaveCopiesStateAtCall) {
  Trained first(runs("1"), {"checkpoint.async=true"});
  first.step(0.5f);
  const std::vector<float> saved = first.read(0);
  first.checkpoints().save(root(), 0, true);
  first.step(1);
  first.checkpoints().wait_for_save();
  EXPECT_FALSE(first.checkpoints().failed());
  Trained second(runs("2"));
  second.checkpoints().load(root(), {});
  EXPECT_EQ(second.read(0), saved);
}

TEST_F(CheckpointerTest, RejectedLoadOfAnotherModelChangesNothing) {
  Trained first(runs("1"));
  first.step(0.5f);
  first.checkpoints().save(root(), 0, false);
  Trained other(runs("2"), {}, {{"a", 1500}, {"c", 40}});
  EXPECT_THAT(failure_of([&] { other.checkpoints().load(root(), {}); }),
              HasSubstr("does not fit the model; missing: weight 'c'; unexpected: weight 'b'"));
  EXPECT_EQ(other.read(0), FakeModel::initial(1500));
  const engine::CheckpointLoadReport report = other.checkpoints().load(root(), {.strict = false});
  EXPECT_EQ(report.missing, (std::vector<std::string>{"weight 'c'"}));
  EXPECT_EQ(report.unexpected, (std::vector<std::string>{"weight 'b'"}));
  EXPECT_EQ(other.read(0), first.read(0));
  EXPECT_EQ(other.read(1), FakeModel::initial(40));
}

TEST_F(CheckpointerTest, RejectsSaveAndLoadWithinAStep) {
  Trained trained(runs("1"), {"train.gradient_accumulation=2"});
  trained.session.begin_backward(1, 1);
  trained.session.end_backward();
  EXPECT_THAT(failure_of([&] { trained.checkpoints().save(root(), 0, false); }),
              HasSubstr("engine.save() was called between"));
  EXPECT_THAT(failure_of([&] { trained.checkpoints().load(root(), {}); }),
              HasSubstr("engine.load() was called between"));
}

TEST_F(CheckpointerTest, SavesPeriodicallyAndKeepsNewestCheckpoints) {
  {
    Trained trained(runs("1"), {in_root(), "checkpoint.every=1", "checkpoint.keep=1"});
    EXPECT_EQ(trained.checkpoints().dir(), root());
    trained.step(1);
    trained.step(1);
  }
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(root()))
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  ASSERT_EQ(names.size(), 1u);
  EXPECT_THAT(names[0], HasSubstr("2"));
}

TEST_F(CheckpointerTest, ResumesFromNewestCheckpoint) {
  std::vector<float> values;
  {
    Trained first(runs("1"), {in_root(), "checkpoint.every=1"});
    first.step(1);
    first.step(2);
    values = first.read(0);
  }
  Trained second(runs("2"), {in_root(), "checkpoint.resume=true"});
  EXPECT_EQ(second.session.progress().step(), 2);
  EXPECT_EQ(second.session.progress().steps_of_run(), 0);
  EXPECT_EQ(second.read(0), values);
}

TEST_F(CheckpointerTest, InitLoadsWeightsOnly) {
  std::string folder;
  std::vector<float> values;
  {
    Trained first(runs("1"));
    first.step(1);
    folder = first.checkpoints().save(root(), 0, false);
    values = first.read(0);
  }
  Trained second(runs("2"), {"checkpoint.init=" + folder});
  EXPECT_EQ(second.session.progress().step(), 0);
  EXPECT_EQ(second.read(0), values);
}

TEST_F(CheckpointerTest, ReleasesFolderLockWhenSessionEnds) {
  {
    Trained first(runs("1"), {in_root(), "checkpoint.every=1"});
    first.step(1);
  }
  Trained second(runs("2"), {in_root(), "checkpoint.every=1"});
  second.step(1);
  EXPECT_EQ(second.session.progress().step(), 1);
}

TEST_F(CheckpointerTest, StartsStatesOfAnotherOptimizerFresh) {
  Trained first(runs("1"), {"optimizer=sgd"});
  first.step(0.5f);
  first.checkpoints().save(root(), 0, false);
  Trained second(runs("2"));
  second.step(3);
  second.step(3);
  const engine::CheckpointLoadReport report = second.checkpoints().load(root(), {});
  EXPECT_THAT(report.fresh, ::testing::Contains("state.exp_avg 'a'"));
  EXPECT_EQ(second.read(0), first.read(0));
  EXPECT_EQ(second.read(0, state::LogicalTensor::state, "exp_avg"), std::vector<float>(1500, 0));
  EXPECT_EQ(second.session.progress().param_steps(), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(second.session.progress().step(), 1) << "the schedule continues";
}

}  // namespace
}  // namespace zr::testing
