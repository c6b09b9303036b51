// One checkpoint matched with a model of one rank: what is read, what is reported, and what is rejected.
#include "engine/checkpoint_loader.hpp"

#include <gtest/gtest.h>

#include "checkpoint_rig.hpp"

namespace zr::testing {
namespace {

using namespace host;
using engine::CheckpointLoader;
using engine::CheckpointLoadOptions;
using state::LogicalTensor;
using Names = std::vector<std::string>;

TEST(CheckpointLoaderTest, ReadsWeightsStatesAndBuffers) {
  NewCheckpoint saved;
  const checkpoint::Checkpoint from = fill(saved).open();
  LoadingJob f;
  const engine::CheckpointLoadReport report = f.load(from);
  EXPECT_EQ(f.read(0), ramp(40, 100));
  EXPECT_EQ(f.read(1), ramp(8, 500));
  EXPECT_EQ(f.read(0, LogicalTensor::state, "exp_avg"), ramp(40, 1100));
  EXPECT_EQ(f.read(0, LogicalTensor::state, "exp_avg_sq"), ramp(40, 2100));
  EXPECT_EQ(f.read(1, LogicalTensor::state, "exp_avg"), ramp(8, 1500));
  EXPECT_EQ(f.read(1, LogicalTensor::state, "exp_avg_sq"), ramp(8, 2500));
  EXPECT_EQ(f.model.statistics, (std::vector<float>{7, 8, 9}));
  EXPECT_EQ(report.folder, from.folder());
  for (const Names& names : {report.missing, report.unexpected, report.other_shape, report.fresh, report.dropped})
    EXPECT_EQ(names, Names{});
}

TEST(CheckpointLoaderTest, MatchesEveryParameterOfTheSameOptimizer) {
  NewCheckpoint saved;
  const checkpoint::Checkpoint from = fill(saved).open();
  LoadingJob f;
  const CheckpointLoadOptions options{.name = "weights.pt"};
  const CheckpointLoader loader = f.loader(from, options);
  EXPECT_TRUE(loader.has_same_optimizer(0) && loader.has_same_optimizer(1));
  EXPECT_EQ(loader.fresh_params(), std::set<uint32_t>{});
  std::vector<std::pair<uint32_t, std::string>> found;
  loader.for_each_weight([&](uint32_t param, const std::string& name) { found.emplace_back(param, name); });
  EXPECT_EQ(found, (std::vector<std::pair<uint32_t, std::string>>{{0, "a"}, {1, "b"}}));
  EXPECT_EQ(loader.report().folder, "weights.pt") << "the name for messages";
  EXPECT_EQ(f.read(0), FakeModel::initial(40)) << "nothing is read before read()";
}

TEST(CheckpointLoaderTest, ReportsAndSkipsTensorsThatDoNotMatch) {
  NewCheckpoint saved;
  saved.add_parameter("a", 41, 100).add_parameter("c", 2, 0).add("buffer", "mean", {1});
  const checkpoint::Checkpoint from = saved.open();
  LoadingJob f;
  const CheckpointLoadOptions strict;
  EXPECT_EQ(failure_of([&] { f.loader(from, strict).check(); }),
            from.folder() +
                ": does not fit the model; missing: weight 'b', buffer 'statistics'; different shape: weight 'a'; "
                "unexpected: weight 'c', buffer 'mean'; set checkpoint.strict = false (in engine.load(), "
                "LoadOptions::strict) to load only the tensors that fit");
  const engine::CheckpointLoadReport report = f.load(from, {.strict = false});
  EXPECT_EQ(report.missing, (Names{"weight 'b'", "buffer 'statistics'"}));
  EXPECT_EQ(report.other_shape, (Names{"weight 'a'"}));
  EXPECT_EQ(report.unexpected, (Names{"weight 'c'", "buffer 'mean'"}));
  EXPECT_EQ(report.fresh,
            (Names{"state.exp_avg 'a'", "state.exp_avg_sq 'a'", "state.exp_avg 'b'", "state.exp_avg_sq 'b'"}));
  EXPECT_EQ(report.dropped,
            (Names{"state.exp_avg 'a'", "state.exp_avg_sq 'a'", "state.exp_avg 'c'", "state.exp_avg_sq 'c'"}));
  EXPECT_EQ(f.read(0), FakeModel::initial(40));
  EXPECT_EQ(f.read(1), FakeModel::initial(8));
  EXPECT_EQ(f.model.statistics, (std::vector<float>{1, 2, 3}));
}

TEST(CheckpointLoaderTest, StrictRequiresTheStatesOfTheSameOptimizer) {
  NewCheckpoint saved;
  saved.add_parameter("a", 40, 100).add("weight", "b", ramp(8, 500)).add("state.exp_avg", "b", ramp(8, 0));
  const checkpoint::Checkpoint from =
      saved.add("state.momentum", "a", ramp(40, 0)).add("buffer", "statistics", {7, 8, 9}).open();
  LoadingJob f;
  const CheckpointLoadOptions strict;
  const CheckpointLoader loader = f.loader(from, strict);
  EXPECT_EQ(loader.fresh_params(), std::set<uint32_t>{1});
  EXPECT_EQ(failure_of([&] { loader.check(); }),
            from.folder() +
                ": does not fit the optimizer; missing: state.exp_avg_sq 'b'; unexpected: state.momentum "
                "'a'; set checkpoint.strict = false (in engine.load(), LoadOptions::strict), or load the weights only "
                "(checkpoint.init, LoadOptions::weights_only)");
}

TEST(CheckpointLoaderTest, AParameterWithOneStateThatIsNotLoadedStartsAllItsStates) {
  NewCheckpoint saved;
  saved.add_parameter("a", 40, 100).add("weight", "b", ramp(8, 500)).add("state.exp_avg", "b", ramp(8, 7));
  const checkpoint::Checkpoint from = saved.add("buffer", "statistics", {7, 8, 9}).open();
  LoadingJob f;
  const engine::CheckpointLoadReport report = f.load(from, {.strict = false});
  EXPECT_EQ(report.fresh, (Names{"state.exp_avg_sq 'b'", "state.exp_avg 'b'"}));
  EXPECT_EQ(report.dropped, Names{"state.exp_avg 'b'"});
  EXPECT_EQ(f.read(1), ramp(8, 500));
  EXPECT_EQ(f.read(1, LogicalTensor::state, "exp_avg"), std::vector<float>(8, 0));
}

TEST(CheckpointLoaderTest, StatesOfAnotherOptimizerAreNotLoaded) {
  NewCheckpoint saved;
  saved.metadata.optimizer = "sgd";
  const checkpoint::Checkpoint from = fill(saved).open();
  LoadingJob f;
  const CheckpointLoadOptions strict;
  CheckpointLoader loader = f.loader(from, strict);
  EXPECT_FALSE(loader.has_same_optimizer(0) || loader.has_same_optimizer(1));
  loader.check();
  loader.read();
  const Names states{"state.exp_avg 'a'", "state.exp_avg_sq 'a'", "state.exp_avg 'b'", "state.exp_avg_sq 'b'"};
  EXPECT_EQ(loader.report().fresh, states);
  EXPECT_EQ(loader.report().dropped, states);
  EXPECT_EQ(loader.fresh_params(), (std::set<uint32_t>{0, 1}));
  EXPECT_EQ(f.read(0), ramp(40, 100));
  EXPECT_EQ(f.read(0, LogicalTensor::state, "exp_avg"), std::vector<float>(40, 0));
}

TEST(CheckpointLoaderTest, WeightsOnlyReadsNoStatesAndReportsNone) {
  NewCheckpoint saved;
  const checkpoint::Checkpoint from = fill(saved).open();
  LoadingJob f;
  const std::vector<float> own(40, 5);
  f.state.write_state(0, "exp_avg", own.data());
  const engine::CheckpointLoadReport report = f.load(from, {.weights_only = true});
  EXPECT_EQ(f.read(0), ramp(40, 100));
  EXPECT_EQ(f.model.statistics, (std::vector<float>{7, 8, 9}));
  EXPECT_EQ(f.read(0, LogicalTensor::state, "exp_avg"), own);
  EXPECT_EQ(report.fresh, Names{});
  EXPECT_EQ(report.dropped, Names{});
}

TEST(CheckpointLoaderTest, FrozenParameterHasAWeightOnly) {
  NewCheckpoint saved;
  saved.add_parameter("a", 40, 100).add("weight", "b", ramp(8, 500)).add("buffer", "statistics", {7, 8, 9});
  LoadingJob f({}, [](FakeModel& model) { model.parameter(1).frozen = true; });
  const engine::CheckpointLoadReport report = f.load(saved.open());
  EXPECT_EQ(f.read(1), ramp(8, 500));
  EXPECT_EQ(report.fresh, Names{});
}

TEST(CheckpointLoaderTest, FindsATiedWeightByItsOtherName) {
  NewCheckpoint saved;
  saved.add_parameter("tied", 40, 100).add_parameter("b", 8, 500).add("buffer", "statistics", {7, 8, 9});
  const checkpoint::Checkpoint from = saved.open();
  LoadingJob f({}, [](FakeModel& model) { model.parameter(0).aliases = {"other", "tied"}; });
  const CheckpointLoadOptions options;
  CheckpointLoader loader = f.loader(from, options);
  Names found;
  loader.for_each_weight([&](uint32_t, const std::string& name) { found.push_back(name); });
  EXPECT_EQ(found, (Names{"tied", "b"}));
  EXPECT_EQ(failure_of([&] { loader.check(); }), "");
  loader.read();
  EXPECT_EQ(f.read(0), ramp(40, 100));
}

TEST(CheckpointLoaderTest, FindsTensorsByTheirNamesInOtherPrograms) {
  NewCheckpoint saved;
  saved.add("weight", "encoder.a", ramp(40, 100)).add("weight", "model.b", ramp(8, 500));
  saved.add("buffer", "model.statistics", {7, 8, 9});
  const checkpoint::Checkpoint from = saved.open();
  LoadingJob f;
  CheckpointLoadOptions options{.weights_only = true};
  options.renames = {{"a", "encoder.a", {}}, {"*", "model.*", {}}};  // the first that matches applies
  CheckpointLoader loader = f.loader(from, options);
  loader.check();
  loader.read();
  Names found;
  loader.for_each_weight([&](uint32_t, const std::string& name) { found.push_back(name); });
  EXPECT_EQ(found, (Names{"encoder.a", "model.b"}));
  EXPECT_EQ(f.read(0), ramp(40, 100));
  EXPECT_EQ(f.read(1), ramp(8, 500));
  EXPECT_EQ(f.model.statistics, (std::vector<float>{7, 8, 9}));
}

TEST(CheckpointLoaderTest, RefreshKeepsNewParametersAndBuffers) {
  NewCheckpoint saved;
  const checkpoint::Checkpoint from = fill(saved).open();
  LoadingJob f;
  engine::ParameterChange change;
  change.any = true;
  change.fresh = {"b"};
  CheckpointLoadOptions options{.strict = false};
  CheckpointLoader loader = f.loader(from, options, &change);
  loader.check();
  loader.read();
  EXPECT_EQ(f.read(0), ramp(40, 100));
  EXPECT_EQ(f.read(1), FakeModel::initial(8)) << "'b' now denotes another tensor";
  EXPECT_EQ(f.read(1, LogicalTensor::state, "exp_avg"), std::vector<float>(8, 0));
  EXPECT_EQ(f.model.statistics, (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(loader.fresh_params(), std::set<uint32_t>{1});
  EXPECT_EQ(loader.report().missing, Names{"weight 'b'"});
}

// A safetensors file of another program, which has weights only.
class OtherProgramTest : public ::testing::Test {
 protected:
  struct Weight {
    std::string name;
    std::vector<float> values;
    std::vector<int64_t> shape = {};  // empty: one dimension
  };
  checkpoint::Checkpoint file(const std::vector<Weight>& weights) {
    checkpoint::TensorHeader header;
    std::string data;
    for (const Weight& weight : weights) {
      const int64_t first = std::ssize(data);
      data += bytes_of(weight.values);
      const std::vector<int64_t> shape = weight.shape.empty() ? std::vector{std::ssize(weight.values)} : weight.shape;
      header.tensors.push_back({weight.name, "F32", shape, first, std::ssize(data)});
    }
    return checkpoint::Checkpoint(scratch_.write("other.safetensors", write_header(header) + data));
  }
  const Weight a_{"a", ramp(40, 100)}, b_{"b", ramp(8, 500)}, statistics_{"statistics", {7, 8, 9}};
  const CheckpointLoadOptions weights_only_{.weights_only = true};

 private:
  const test::Scratch scratch_;
};

TEST_F(OtherProgramTest, BuffersAreReadFromWeights) {
  const checkpoint::Checkpoint from = file({a_, b_, statistics_});
  ASSERT_TRUE(from.from_other_program());
  LoadingJob f;
  f.load(from, weights_only_);
  EXPECT_EQ(f.read(0), ramp(40, 100));
  EXPECT_EQ(f.read(1), ramp(8, 500));
  EXPECT_EQ(f.model.statistics, (std::vector<float>{7, 8, 9}));
}

TEST_F(OtherProgramTest, TiedWeightMayBeListedUnderEachOfItsNames) {
  const checkpoint::Checkpoint from = file({{"tied", ramp(40, 100)}, a_, b_, statistics_});
  LoadingJob f({}, [](FakeModel& model) { model.parameter(0).aliases = {"tied"}; });
  CheckpointLoader loader = f.loader(from, weights_only_);
  EXPECT_TRUE(loader.has_repeated());
  EXPECT_EQ(loader.names_to_read(), (Names{"a", "b", "statistics", "tied"}));
  EXPECT_EQ(failure_of([&] { loader.compare_repeated(); }), "");
  EXPECT_EQ(loader.report().unexpected, Names{});
}

TEST_F(OtherProgramTest, NamesOfATiedWeightMustHaveEqualValues) {
  const checkpoint::Checkpoint from = file({{"tied", ramp(40, 101)}, a_, b_, statistics_});
  LoadingJob f({}, [](FakeModel& model) { model.parameter(0).aliases = {"tied"}; });
  CheckpointLoader strict = f.loader(from, weights_only_);
  EXPECT_EQ(failure_of([&] { strict.compare_repeated(); }),
            from.folder() +
                ": 'a' and 'tied' are one tied parameter of the model, but differ in the file; save the file from a "
                "model in which they are tied, or set checkpoint.strict = false (in engine.load(), "
                "LoadOptions::strict), which loads 'a'");
  const CheckpointLoadOptions options{.weights_only = true, .strict = false};
  CheckpointLoader loader = f.loader(from, options);
  loader.compare_repeated();
  EXPECT_EQ(loader.report().unexpected, Names{"weight 'tied'"});
}

TEST_F(OtherProgramTest, TiedWeightOfAnotherShapeIsReportedOnce) {
  const checkpoint::Checkpoint from = file({{"tied", ramp(41, 100)}, {"a", ramp(41, 100)}, b_, statistics_});
  LoadingJob f({}, [](FakeModel& model) { model.parameter(0).aliases = {"tied"}; });
  const CheckpointLoader loader = f.loader(from, weights_only_);
  EXPECT_EQ(loader.report().other_shape, Names{"weight 'a'"});
  EXPECT_EQ(loader.report().unexpected, Names{});
  EXPECT_EQ(loader.names_to_read(), (Names{"b", "statistics"}));
}

TEST_F(OtherProgramTest, BufferWithoutElementsMustHaveTheSameShape) {
  LoadingJob f({}, [](FakeModel& model) { model.without_elements = {{"empty", nullptr, 0, "F32", {0, 3}}}; });
  const checkpoint::Checkpoint same = file({a_, b_, statistics_, {"empty", {}, {0, 3}}});
  EXPECT_EQ(f.load(same, weights_only_).unexpected, Names{});
  const checkpoint::Checkpoint other = file({a_, b_, statistics_, {"empty", {}, {0, 4}}});
  const CheckpointLoader loader = f.loader(other, weights_only_);
  EXPECT_EQ(loader.report().other_shape, Names{"buffer 'empty'"});
  EXPECT_EQ(loader.report().unexpected, Names{});
}

TEST(CheckRenamesTest, RejectsARenameThatMatchesNothing) {
  LoadingJob f({}, [](FakeModel& model) { model.parameter(0).aliases = {"tied"}; });
  const std::vector<plan::Parameter>& parameters = f.job.plan.input.parameters;
  const config::Origin origin{config::Origin::From::file, "gpt.toml", 12, 3};
  engine::check_renames({{"a", "x", origin}, {"ti*", "y", origin}, {"stat*", "z", origin}}, parameters,
                        f.model.buffers());
  EXPECT_EQ(failure_of([&] {
              engine::check_renames({{"b", "x", origin}, {"statistic", "y", origin}}, parameters, f.model.buffers());
            }),
            "gpt.toml:12:3: checkpoint.rename: 'statistic' matches no weight of the model; the nearest is "
            "'statistics'; `*` matches any sequence of characters");
  EXPECT_EQ(failure_of([&] {
              engine::check_renames({{"layers.*.q", "y", origin}}, parameters, f.model.buffers());
            }),
            "gpt.toml:12:3: checkpoint.rename: 'layers.*.q' matches no weight of the model; `*` matches any sequence "
            "of characters");
}

TEST(ListOfTest, NamesAtMostFive) {
  EXPECT_EQ(engine::list_of("missing", {}), "");
  EXPECT_EQ(engine::list_of("missing", {"weight 'a'"}), "; missing: weight 'a'");
  EXPECT_EQ(engine::list_of("missing", {"1", "2", "3", "4", "5"}), "; missing: 1, 2, 3, 4, 5");
  EXPECT_EQ(engine::list_of("missing", {"1", "2", "3", "4", "5", "6", "7"}), "; missing: 1, 2, 3, 4, 5 and 2 more");
}

}  // namespace
}  // namespace zr::testing
