// Tensors of a checkpoint whose dtype or ranks differ from the job's, on one rank.
#include <gtest/gtest.h>

#include "checkpoint_rig.hpp"
#include "engine/checkpoint_loader.hpp"

namespace zr::testing {
namespace {

using namespace host;
using engine::CheckpointLoadOptions;

TEST(CheckpointLoaderTest, RejectsAnotherDtypeUnlessItMayConvert) {
  NewCheckpoint saved;
  saved.add("weight", "a", ramp(40, 1), ZR_BF16).add("weight", "b", ramp(8, 1), ZR_BF16);
  const checkpoint::Checkpoint from = saved.add("buffer", "statistics", {7, 8, 9}).open();
  LoadingJob f;
  const CheckpointLoadOptions options{.weights_only = true};
  EXPECT_EQ(failure_of([&] { f.loader(from, options).check(); }),
            from.folder() +
                ": weight 'a' is BF16, but train.dtype requires F32; set train.dtype to the checkpoint's "
                "dtype, or checkpoint.convert = true (in engine.load(), LoadOptions::convert)");
  NewCheckpoint with_master;
  with_master.add("weight", "a", ramp(40, 1), ZR_BF16).add("master", "a", ramp(40, 1)).add("weight", "b", ramp(8, 1));
  const checkpoint::Checkpoint better = with_master.add("buffer", "statistics", {7, 8, 9}).open();
  EXPECT_EQ(failure_of([&] { f.loader(better, options).check(); }),
            better.folder() +
                ": weight 'a' is BF16, but train.dtype requires F32; set train.dtype to the checkpoint's "
                "dtype, or checkpoint.convert = true (in engine.load(), LoadOptions::convert), which converts from the "
                "fp32 master");
}

// Weights of both widths: train.keep_fp32 decides, not train.dtype.
TEST(CheckpointLoaderTest, NamesTheKeyThatDecidesTheDtypeOfAWeight) {
  NewCheckpoint saved;
  saved.add("weight", "a", ramp(40, 1), ZR_BF16).add("master", "a", ramp(40, 1)).add("weight", "b", ramp(8, 1));
  const checkpoint::Checkpoint from = saved.add("buffer", "statistics", {7, 8, 9}).open();
  const CheckpointLoadOptions options{.weights_only = true};
  LoadingJob none({"train.dtype=bf16"}), both({"train.dtype=bf16", "train.keep_fp32=[\"a\"]"});
  const std::string end =
      "; set train.keep_fp32 as in the job that saved the checkpoint, or checkpoint.convert = true (in engine.load(), "
      "LoadOptions::convert)";
  EXPECT_EQ(failure_of([&] { none.loader(from, options).check(); }),
            from.folder() + ": weight 'b' is F32, but this job has it in BF16" + end);
  EXPECT_EQ(failure_of([&] { both.loader(from, options).check(); }),
            from.folder() + ": weight 'a' is BF16, but train.keep_fp32 keeps this parameter in F32" + end +
                ", which converts from the fp32 master");
}

TEST(CheckpointLoaderTest, ConvertsWeightsFromTheMasterIfThereIsOne) {
  const std::vector<float> exact(40, 1.0f + 1.0f / 1024);  // bf16 rounds it to 1
  NewCheckpoint saved;
  saved.add("weight", "a", exact, ZR_BF16).add("master", "a", exact).add("weight", "b", ramp(8, 1), ZR_F16);
  const checkpoint::Checkpoint from = saved.add("buffer", "statistics", {7, 8, 9}, ZR_F16).open();
  LoadingJob f;
  const CheckpointLoadOptions options{.weights_only = true, .convert = true};
  f.load(from, options);
  EXPECT_EQ(f.read(0), exact);
  EXPECT_EQ(f.read(1), ramp(8, 1)) << "upcast from fp16";
  EXPECT_EQ(f.model.statistics, (std::vector<float>{7, 8, 9}));
}

// 300000 elements: more than are converted at a time.
TEST(CheckpointLoaderTest, ConvertsWeightsOfAnySize) {
  std::vector<float> values(300000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251);  // exact in bf16
  NewCheckpoint saved;
  saved.add("weight", "a", values, ZR_BF16).add("weight", "b", ramp(8, 1), ZR_BF16);
  const checkpoint::Checkpoint from = saved.add("buffer", "statistics", {7, 8, 9}).open();
  LoadingJob f({}, {}, 300000);
  f.load(from, {.weights_only = true, .convert = true});
  EXPECT_EQ(f.read(0), values);
}

TEST(CheckpointLoaderTest, WeightOfFp32IsTheMasterOfANarrowJob) {
  const std::vector<float> exact(40, 1.0f + 1.0f / 1024);
  NewCheckpoint saved;
  saved.add("weight", "a", exact).add("weight", "b", ramp(8, 1));
  const checkpoint::Checkpoint from = saved.add("buffer", "statistics", {7, 8, 9}).open();
  LoadingJob f({"train.dtype=bf16"});
  f.load(from, {.weights_only = true, .convert = true});
  EXPECT_EQ(f.read(0), exact) << "the master";
  EXPECT_EQ(f.weights(0, ZR_BF16), std::vector<float>(40, 1));
}

TEST(CheckpointLoaderTest, ConvertsNoIntegers) {
  NewCheckpoint saved;
  saved.add_parameter("a", 40, 100).add_parameter("b", 8, 500);
  const checkpoint::Checkpoint from = saved.add_bytes("buffer", "statistics", "I64", {3}, std::string(24, '\0')).open();
  LoadingJob f;
  const CheckpointLoadOptions options{.convert = true};
  EXPECT_EQ(failure_of([&] { f.loader(from, options).check(); }),
            from.folder() +
                ": buffer 'statistics' is I64, but the model has it as F32, and Zeroth converts only "
                "between F32, BF16 and F16; convert the tensor before it is saved, or load another "
                "checkpoint");
}

// Two ranks saved [10, 20, 30] and [20, 40, 60].
TEST(CheckpointLoaderTest, ChoosesAmongTheBuffersOfOtherRanksByTrainBuffers) {
  for (const auto& [rule, expected] :
       {std::pair{"rank0", std::vector<float>{10, 20, 30}}, {"mean", {15, 30, 45}}, {"per_rank", {10, 20, 30}}}) {
    NewCheckpoint saved;
    saved.add_parameter("a", 40, 100).add_parameter("b", 8, 500).add("buffer", "statistics", {9, 9, 9});
    const checkpoint::Checkpoint from =
        saved.add(checkpoint::kRankBuffer, "statistics", {10, 20, 30, 20, 40, 60}, ZR_F32, {2, 3}).open();
    LoadingJob f({std::string("train.buffers=") + rule});
    f.load(from);
    EXPECT_EQ(f.model.statistics, expected) << rule;
  }
}

TEST(CheckpointLoaderTest, RestoresTheBuffersOfTheSameNumberOfRanks) {
  NewCheckpoint saved;
  saved.add_parameter("a", 40, 100).add_parameter("b", 8, 500).add("buffer", "statistics", {9, 9, 9});
  const checkpoint::Checkpoint from =
      saved.add(checkpoint::kRankBuffer, "statistics", {10, 20, 30}, ZR_F32, {1, 3}).open();
  LoadingJob f({"train.buffers=mean"});
  f.load(from);
  EXPECT_EQ(f.model.statistics, (std::vector<float>{10, 20, 30}));
}

}  // namespace
}  // namespace zr::testing
