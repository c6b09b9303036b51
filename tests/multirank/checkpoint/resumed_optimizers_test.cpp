// Resumed jobs with several optimizers, or with one that has values of its own.
#include <cstdlib>
#include <functional>

#include "checkpoint/manifest.hpp"
#include "multirank/checkpoint/bodies.hpp"

namespace zr::test {
namespace {

// The parameters that `match` names are updated by `other`, the rest by `use`.
std::string two_optimizers(const std::string& use, const std::string& other, const std::string& match) {
  return "optimizer.use=" + use + " 'optimizer.groups=[{match=[" + match + "],use=\"" + other + "\"}]' ";
}

// The same as two_optimizers(), written the other way round.
std::string swapped_optimizers(const std::string& use, const std::string& other, const std::string& match) {
  return "optimizer.use=" + other + " 'optimizer.groups=[{match=[" + match + "],use=\"" + other +
         "\"},{match=[\"*\"],use=\"" + use + "\"}]' ";
}

// "aged" is an optimizer of the tests with a value that belongs to no parameter.
class ResumedOptimizersTest : public CheckpointTest {
 protected:
  ResumedOptimizersTest() { ::setenv("ZR_PLUGIN_PATH", ZR_BUILD_DIR "/tests/plugins", 1); }
  ~ResumedOptimizersTest() override { ::unsetenv("ZR_PLUGIN_PATH"); }
  // Trains four steps at once, and two before and two after a resume; `change` edits the checkpoint.
  void expect_same_result(const std::string& before, const std::string& after,
                          const std::function<void(host::checkpoint::Manifest&)>& change = {}) {
    run(2, "job.name=whole\n", "strategy=zero2 " + before);
    run(2, "job.name=half checkpoint.dir=c checkpoint.every=2 train.steps=2\n", "strategy=zero2 " + before);
    if (change) {
      const std::string file = scratch_.path("c/step-00000002/manifest.json");
      host::checkpoint::Manifest manifest = host::checkpoint::parse_manifest(file, host::checkpoint::read_json(file));
      change(manifest);
      manifest.metadata_json = to_text(manifest.metadata);
      scratch_.write("c/step-00000002/manifest.json", to_text(manifest));
    }
    run(2, "job.name=resumed checkpoint.dir=c checkpoint.resume=true\n", "strategy=zero1 " + after);
    EXPECT_EQ(hash("resumed"), hash("whole"));
  }
};

// The order of the optimizers is of no importance, and a parameter that moves to another one restarts alone.
TEST_F(ResumedOptimizersTest, StatesBelongToTheOptimizerOfTheirParameter) {
  const std::string biases = "\"*.bias\",\"*norm.*\"", resume = "checkpoint.dir=c checkpoint.resume=true ";
  run(2, "job.name=a checkpoint.dir=c checkpoint.every=2 train.steps=2\n",
      "strategy=zero2 " + two_optimizers("sgd", "adamw", biases));
  const Outcome swapped = run_pair(prints_hash, resume + "optimizer.use=adamw 'optimizer.groups=[{match=[" + biases +
                                                    "],use=\"adamw\"},{match=[\"*\"],use=\"sgd\"}]'");
  ASSERT_EQ(swapped.code, 0) << swapped.output;
  EXPECT_EQ(swapped.output.find("starts states at zero"), std::string::npos) << swapped.output;
  EXPECT_EQ(swapped.output.find("ignores saved states"), std::string::npos) << swapped.output;
  EXPECT_NE(swapped.output.find("step 2 hash " + hash("a")), std::string::npos) << swapped.output;
  const Outcome moved = run_pair(prints_hash, resume + two_optimizers("sgd", "adamw", "\"*norm.*\""));
  ASSERT_EQ(moved.code, 0) << moved.output;
  EXPECT_NE(moved.output.find("starts states at zero; missing: state.momentum_buffer '"), std::string::npos)
      << moved.output;
  EXPECT_NE(moved.output.find("ignores saved states; unused: state.exp_avg '"), std::string::npos) << moved.output;
  EXPECT_EQ(moved.output.find("missing: state.exp_avg"), std::string::npos) << moved.output;
  EXPECT_EQ(moved.output.find("norm"), std::string::npos) << moved.output;
}

TEST_F(ResumedOptimizersTest, ContinueTheValueThatBelongsToNoParameter) {
  expect_same_result("optimizer=aged", "optimizer=aged");
}

TEST_F(ResumedOptimizersTest, ContinueTheValuesOfEachOptimizerInAnyOrder) {
  const std::string biases = "\"*.bias\",\"*norm.*\"";
  expect_same_result(two_optimizers("adamw", "aged", biases), swapped_optimizers("adamw", "aged", biases));
}

TEST_F(ResumedOptimizersTest, ContinueStatesAndStepCountsInAnyOrder) {
  const std::string biases = "\"*.bias\",\"*norm.*\"";
  expect_same_result(two_optimizers("sgd", "adamw", biases), swapped_optimizers("sgd", "adamw", biases));
}

// Older files name neither the optimizer of a weight nor, for the first optimizer, that of a value.
TEST_F(ResumedOptimizersTest, ReadOlderFiles) {
  expect_same_result("optimizer=aged", "optimizer=aged", [](host::checkpoint::Manifest& manifest) {
    for (host::checkpoint::SavedTensor& tensor : manifest.tensors) tensor.optimizer.reset();
    ASSERT_EQ(manifest.metadata.globals.count("aged/first"), 1u);
    manifest.metadata.globals = {{"first", manifest.metadata.globals["aged/first"]}};
  });
}

TEST_F(ResumedOptimizersTest, WarnOfAValueThatIsNotLoaded) {
  run(2, "job.name=half checkpoint.dir=c checkpoint.every=2 train.steps=2\n", "strategy=zero2 optimizer=aged");
  const Outcome other = run_pair(prints_hash, "checkpoint.dir=c checkpoint.resume=true optimizer=sgd");
  EXPECT_EQ(other.code, 0) << other.output;
  EXPECT_NE(other.output.find("the value 'first' that optimizer 'aged' saved in the checkpoint is not loaded: this job "
                              "does not use the optimizer"),
            std::string::npos)
      << other.output;
}

// "ranks": the value differs between the ranks; "twice": it is saved twice.
TEST_F(ResumedOptimizersTest, RejectValuesThatDifferBetweenRanksOrAreSavedTwice) {
  const std::string job = "strategy=zero2 checkpoint.dir=c checkpoint.every=2 optimizer=aged optimizer.aged.defect=";
  const Outcome ranks = shell(launch(2, engine_tests::trains, job + "ranks train.steps=2"));
  EXPECT_EQ(ranks.code, 2) << ranks.output;
  EXPECT_NE(ranks.output.find("a value of an optimizer that belongs to no parameter differs between rank 0 and rank 1 "
                              "(aged/first), and a checkpoint has it once; correct the plug-in, or choose another "
                              "optimizer"),
            std::string::npos)
      << ranks.output;
  const Outcome twice = shell(launch(2, engine_tests::trains, job + "twice train.steps=2"));
  EXPECT_NE(twice.code, 0);
  EXPECT_NE(twice.output.find("save_globals: it saved the key 'first' twice: this is a bug in the plug-in"),
            std::string::npos)
      << twice.output;
}

// The test of this file can fail: without the value, the rate differs.
TEST_F(ResumedOptimizersTest, DifferWithoutTheValue) {
  run(2, "job.name=whole\n", "strategy=zero2 optimizer=aged");
  run(2, "job.name=half checkpoint.dir=c checkpoint.every=2 train.steps=2\n", "strategy=zero2 optimizer=aged");
  const std::string file = "c/step-00000002/manifest.json";
  host::checkpoint::Manifest manifest =
      host::checkpoint::parse_manifest(file, host::checkpoint::read_json(scratch_.path(file)));
  manifest.metadata.globals = {{"other/first", "12345678"}};
  manifest.metadata.optimizer = "other, aged";  // values of an optimizer that the job does not have are ignored
  manifest.metadata_json = to_text(manifest.metadata);
  scratch_.write(file, to_text(manifest));
  run(2, "job.name=resumed checkpoint.dir=c checkpoint.resume=true\n", "strategy=zero2 optimizer=aged");
  EXPECT_NE(hash("resumed"), hash("whole"));
}

}  // namespace
}  // namespace zr::test
