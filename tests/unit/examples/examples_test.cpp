// The examples as a user starts them: their expected results.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "contract/shell.hpp"
#include "scratch.hpp"

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

TEST(Examples, QuickstartLearnsItsFunction) {
  const zr::test::Scratch scratch;
  const auto run = shell(kBin + "zeroth train " + kExamples +
                         "quickstart/quickstart.toml job.threads=1 job.runs=" + scratch.folder().string());
  ASSERT_EQ(run.code, 0) << run.output;
  EXPECT_LT(summary_of(scratch, "quickstart")["loss"].get<double>(), 0.1) << run.output;  // the README says 0.057
}

TEST(Examples, GptTrainsLikeThePlainLibtorchProgram) {
  const zr::test::Scratch scratch;
  std::string text;
  while (text.size() < 100'000) text += shell("cat " ZR_SOURCE_DIR "/LICENSE").output;
  scratch.write("text", text);
  const auto ours = shell(kBin + "zeroth train " + kExamples + "gpt/gpt.toml model.layers=2 train.steps=11 data.text=" +
                          scratch.path("text") + " sample.length=0 job.runs=" + scratch.folder().string());
  ASSERT_EQ(ours.code, 0) << ours.output;
  const auto plain =
      shell("OMP_NUM_THREADS=1 " + kBin + "gpt_plain --layers 2 --steps 11 --sample 0 --text " + scratch.path("text"));
  ASSERT_EQ(plain.code, 0) << plain.output;

  std::ifstream metrics(scratch.path("gpt/metrics.jsonl"));
  std::string first;
  std::getline(metrics, first);
  const auto lines = plain.lines();
  ASSERT_GE(lines.size(), 2u) << plain.output;
  EXPECT_EQ(json::parse(first)["loss"].get<double>(), number_after("loss", lines[0]))
      << "nothing differs before the first update";
  const auto summary = summary_of(scratch, "gpt");
  EXPECT_NEAR(summary["loss"].get<double>(), number_after(" loss", lines[1]), 1e-4);
  EXPECT_NEAR(summary["val_loss"].get<double>(), number_after("val_loss", lines[1]), 1e-4);
}

TEST(Examples, GptRefusesAWidthThatItsHeadsDoNotDivide) {
  const zr::test::Scratch scratch;
  const auto run = shell(kBin + "gpt " + kExamples +
                         "gpt/gpt.toml job.ranks=1 model.width=200 job.runs=" + scratch.folder().string());
  EXPECT_EQ(run.code, 2);
  EXPECT_NE(run.output.find("zeroth: error: model.width = 200 is not a multiple of model.heads = 6\n"),
            std::string::npos)
      << run.output;
}

}  // namespace
