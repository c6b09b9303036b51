// Runs the examples as a user does and checks their results.
#include <gtest/gtest.h>

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <regex>

#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using nlohmann::json;
using zr::testing::shell;

const std::string kBin = ZR_BUILD_DIR "/bin/";
const std::string kExamples = ZR_SOURCE_DIR "/examples/";

json summary_of(const zr::test::Scratch& scratch, const std::string& name) {
  return json::parse(std::ifstream(scratch.path(name + "/summary.json")));
}

double number_after(const std::string& word, const std::string& line) {
  std::smatch found;
  return std::regex_search(line, found, std::regex(word + " ([0-9.e+-]+)")) ? std::stod(found[1]) : NAN;
}

TEST(ExamplesTest, QuickstartLearnsItsFunction) {
  const zr::test::Scratch scratch;
  const auto run = shell(kBin + "zeroth train " + kExamples +
                         "quickstart/quickstart.toml job.threads=1 job.runs=" + scratch.folder().string());
  ASSERT_EQ(run.code, 0) << run.output;
  EXPECT_LT(summary_of(scratch, "quickstart")["loss"].get<double>(), 0.1) << run.output;  // the README says 0.057
}

// fp32 from plain text, bf16 from gzipped text.
class GptTest : public ::testing::TestWithParam<std::pair<std::string, double>> {};

TEST_P(GptTest, TrainsLikeThePlainLibtorchProgram) {
  const auto& [dtype, nearness] = GetParam();
  const zr::test::Scratch scratch;
  std::string text;
  while (text.size() < 100'000) text += shell("cat " ZR_SOURCE_DIR "/LICENSE").output;
  scratch.write("text", text);
  std::string file = scratch.path("text");
  if (dtype == "bf16") {
    ASSERT_EQ(shell("gzip " + file).code, 0);
    file += ".gz";
  }
  const auto ours =
      shell(kBin + "zeroth train " + kExamples +
            "gpt/gpt.toml model.layers=2 model.context=32 train.micro_batch=4 train.steps=11 data.text=" + file +
            " train.dtype=" + dtype + " sample.length=0 job.runs=" + scratch.folder().string());
  ASSERT_EQ(ours.code, 0) << ours.output;
  const auto plain =
      shell("OMP_NUM_THREADS=1 " + kBin + "gpt_plain --layers 2 --context 32 --micro-batch 4 --steps 11 " +
            "--sample 0 --dtype " + dtype + " --text " + file);
  ASSERT_EQ(plain.code, 0) << plain.output;

  std::ifstream metrics(scratch.path("gpt/metrics.jsonl"));
  std::string first;
  std::getline(metrics, first);
  const auto lines = plain.lines();
  ASSERT_GE(lines.size(), 2u) << plain.output;
  EXPECT_EQ(json::parse(first)["loss"].get<double>(), number_after("loss", lines[0]))
      << "the losses are equal before the first update";
  const auto summary = summary_of(scratch, "gpt");
  EXPECT_NEAR(summary["loss"].get<double>(), number_after(" loss", lines[1]), nearness);
  EXPECT_NEAR(summary["val_loss"].get<double>(), number_after("val_loss", lines[1]), nearness);
}
const auto dtype_of = [](const auto& info) { return info.param.first; };
INSTANTIATE_TEST_SUITE_P(Examples, GptTest, ::testing::Values(std::pair("fp32", 1e-4)), dtype_of);
INSTANTIATE_TEST_SUITE_P(SLOW_Examples, GptTest, ::testing::Values(std::pair("bf16", 2e-2)), dtype_of);

// Six runs.
TEST(AdamW8BitOnGptTest, SLOW_ReachesTheLossOfAdamWWithinOnePercent) {
  const zr::test::Scratch scratch;
  const auto text = shell("cd /usr/share/common-licenses && cat GPL-2 GPL-3 LGPL-2.1 Apache-2.0");
  if (text.code != 0) GTEST_SKIP() << "this system has no licences in /usr/share/common-licenses: " << text.output;
  scratch.write("text", text.output);
  const auto losses = [&](const std::string& optimizer, int seed) {
    const std::string name = optimizer + std::to_string(seed);
    const auto run =
        shell(kBin + "zeroth train " + kExamples + "gpt/gpt.toml model.layers=2 model.width=96" +
              " model.context=64 train.steps=300 optimizer.lr=0.002 schedule.cosine.warmup=100 train.seed=" +
              std::to_string(seed) + " data.text=" + scratch.path("text") + " optimizer.use=" + optimizer +
              " optimizer." + optimizer + ".beta2=0.99 optimizer." + optimizer +
              ".weight_decay=0.1 sample.length=0 job.name=" + name + " job.runs=" + scratch.folder().string());
    EXPECT_EQ(run.code, 0) << run.output;
    const auto summary = summary_of(scratch, name);
    return std::pair(summary["loss"].get<double>(), summary["val_loss"].get<double>());
  };
  // One seed differs by up to 1.3 %, in both directions: training amplifies any difference of rounding.
  constexpr int kSeeds = 3;
  double loss = 0, loss_8bit = 0, validation = 0, validation_8bit = 0;
  for (int seed = 1; seed <= kSeeds; ++seed) {
    const auto [train, held_out] = losses("adamw", seed);
    const auto [train_8bit, held_out_8bit] = losses("adamw8bit", seed);
    EXPECT_LT(held_out, 2.8) << "it has learned more than the frequencies of letters; seed " << seed;
    EXPECT_NE(train_8bit, train);
    std::cout << "seed " << seed << ": loss " << train << ", with 8 bits " << train_8bit << "; validation loss "
              << held_out << ", with 8 bits " << held_out_8bit << std::endl;
    loss += train / kSeeds;
    loss_8bit += train_8bit / kSeeds;
    validation += held_out / kSeeds;
    validation_8bit += held_out_8bit / kSeeds;
  }
  EXPECT_NEAR(loss_8bit, loss, 0.01 * loss);
  EXPECT_NEAR(validation_8bit, validation, 0.01 * validation);
}

TEST(ExamplesTest, LoadOnlyTheOpenMpRuntimeOfLibtorch) {
  for (const char* program : {"gpt", "gpt_plain", "quickstart"}) {
    const auto libraries = shell("ldd " + kBin + program);
    ASSERT_EQ(libraries.code, 0) << libraries.output;
    std::string torch, openmp;
    int runtimes = 0;
    for (const std::string& line : libraries.lines()) {
      std::smatch at;
      if (!std::regex_search(line, at, std::regex("=> (.*)/(libtorch_cpu|lib[gi]?omp)[^/]*\\.so"))) continue;
      (at[2] == "libtorch_cpu" ? torch : openmp) = at[1];
      runtimes += at[2] != "libtorch_cpu";
    }
    EXPECT_EQ(runtimes, 1) << libraries.output;
    EXPECT_EQ(openmp, torch) << "libtorch's own";
  }
}

TEST(ExamplesTest, GptRejectsAWidthThatItsHeadsDoNotDivide) {
  const zr::test::Scratch scratch;
  const auto run = shell(kBin + "gpt " + kExamples +
                         "gpt/gpt.toml job.ranks=1 model.width=200 job.runs=" + scratch.folder().string());
  EXPECT_EQ(run.code, 2);
  EXPECT_NE(run.output.find("zeroth: error: command line: model.width = 200 is not a multiple of model.heads = 6 (" +
                            kExamples + "gpt/gpt.toml:14:9)\n"),
            std::string::npos)
      << run.output;
}

}  // namespace
