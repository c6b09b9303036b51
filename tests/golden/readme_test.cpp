// Tries every command of the README files: each must be in the table below.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using zr::testing::shell;
namespace fs = std::filesystem;

const std::string kRoot = ZR_SOURCE_DIR "/";
const std::vector<std::string> kFiles{"README.md",
                                      "CONTRIBUTING.md",
                                      "sdk/README.md",
                                      "examples/gpt/README.md",
                                      "examples/quickstart/README.md",
                                      "examples/torchscript/README.md"};

std::string text_of(const std::string& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

std::string trimmed(std::string text) {
  text.erase(0, text.find_first_not_of(' '));
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

bool is_command(const std::string& text) {
  static const std::regex begins(
      R"(^(make|cmake|ctest|git|apt-get|zeroth|torchrun|mpirun|srun|export|ZR_\w+=\S+)"
      R"(|\./\w+|build/(bin|tests)/\w+)( |$))");
  return std::regex_search(text, begins);
}

// The commands of a file: indented lines without their explanations, and text in backticks.
std::vector<std::string> commands_of(const std::string& text) {
  std::vector<std::string> all;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("    ", 0) == 0) {
      line = trimmed(line);
      if (const auto end = line.find("  "); end != line.npos) line.resize(end);
      if (is_command(line)) all.push_back(line);
      continue;
    }
    static const std::regex quoted("`([^`]+)`");
    for (std::sregex_iterator at(line.begin(), line.end(), quoted), none; at != none; ++at)
      if (is_command((*at)[1])) all.push_back((*at)[1]);
  }
  return all;
}

struct Try {
  std::string command;    // the command to run, in a scratch folder; {root} and {bin} are replaced
  std::string says = "";  // a regular expression that its output must match
};

const std::string kQuick = " {root}/examples/quickstart/quickstart.toml";
const std::string kBrief = " train.steps=2 job.threads=1";
const std::string kSaved = "{bin}/zeroth train" + kQuick + kBrief + " checkpoint.dir=c checkpoint.every=2 > log && ";
Try make(const std::string& target, const std::string& does) {
  return {"make -C {root} -n " + target, does};  // -n: only prints the commands
}
Try overridden(const std::string& overrides) {
  return {"{bin}/zeroth explain {root}/examples/gpt/gpt.toml " + overrides, "command line"};
}
Try in_file(const std::string& file, const std::string& says) { return {"cat {root}/" + file, says}; }
const std::string kPackage = "tests/package/package.cmake";  // is itself a test

const std::map<std::string, Try> kTries{
    {"make", {"make -C {root}", "train +builds what training needs"}},
    {"make setup", make("setup", "\\.ci/setup")},
    {"make build", make("build", "cmake --build build")},
    {"make train", make("train", "cmake --build [^]*build/bin/zeroth train examples/gpt/gpt\\.toml")},
    {"make test", make("test", "cmake --build [^]*\\.ci/test")},
    {"make test-all", make("test-all", "cmake --build [^]*\\.ci/test all")},
    {"ZR_UPDATE_GOLDEN=1 ctest --test-dir build -L golden",
     in_file("tests/support/golden_cases.hpp", "ZR_UPDATE_GOLDEN")},
    {"ZR_UPDATE_GOLDEN=1 ctest --test-dir build -R Layout",
     {"ctest --test-dir {bin}/.. -N -R Layout", "Total Tests: [1-9]"}},
    {"cmake --build build && ctest --test-dir build -L unit",
     {"ctest --test-dir {bin}/.. -N -L unit", "Total Tests: [1-9]"}},
    {"ctest --test-dir build -R NAME --output-on-failure",
     {"ctest --test-dir {bin}/.. -N -R Readme --output-on-failure", "Total Tests: [1-9]"}},
    {"build/tests/engine_test --rank EngineTest.EvaluationPreservesRandomState tests/multirank/parity/parity.toml",
     {"{bin}/../tests/engine_test --rank EngineTest.EvaluationPreservesRandomState "
      "{root}/tests/multirank/parity/parity.toml && grep -c . runs/parity/metrics.jsonl",
      "^1\n"}},
    {"cmake --install build --component sdk --prefix DIR", in_file(kPackage, "--component sdk --prefix")},
    {"make matrix", make("matrix", "cmake --build [^]*build/tests/parity_matrix")},
    {"make bench", make("bench", "ZR_BENCHMARKS=ON[^]*\\.ci/bench")},
    {"make peers", make("peers", "cmake --build [^]*\\.ci/peers")},
    {"make format", make("format", "clang-format -i")},
    {"make lint", make("lint", "run-clang-tidy")},
    {"make train ARGS=\"strategy=zero0 train.steps=200\"",
     make("train ARGS=\"strategy=zero0 train.steps=200\"", "gpt\\.toml strategy=zero0 train\\.steps=200")},
    {"make train ARGS=\"train.dtype=bf16 job.name=bf16\"", overridden("train.dtype=bf16 job.name=bf16")},
    {"cmake --preset asan && cmake --build --preset asan && ctest --preset asan",
     {"cd {root} && cmake --list-presets=all .", "\"asan\"[^]*\"asan\"[^]*\"asan\""}},
    {"cmake --preset tsan && cmake --build --preset tsan && ctest --preset tsan",
     {"cd {root} && cmake --list-presets=all .", "\"tsan\"[^]*\"tsan\"[^]*\"tsan\""}},
    {"cmake --preset release && cmake --build --preset release",
     {"cd {root} && cmake --list-presets=all .", "\"release\"[^]*\"release\""}},
    {"cmake --install build --prefix DIR", in_file(kPackage, "--install \\$\\{BUILD\\} --prefix")},
    {"cmake -S examples/quickstart -B /tmp/quickstart -DCMAKE_PREFIX_PATH=DIR",
     in_file(kPackage, "-DCMAKE_PREFIX_PATH=[^]*examples/quickstart -B")},
    {"cmake --build /tmp/quickstart", in_file(kPackage, "--build \\$\\{SCRATCH\\}/quickstart")},
    {"./app job.toml", {"cp {bin}/quickstart app && cp" + kQuick + " job.toml && ./app job.toml" + kBrief}},
    {"zeroth launch -n 4 -- ./app job.toml",
     {"cp {bin}/quickstart app && cp" + kQuick + " job.toml && {bin}/zeroth launch -n 4 -- ./app job.toml" + kBrief +
          " && cat runs/job/summary.json",
      "\"ranks\": 4"}},
    {"zeroth train FILE [key=value ...]", {"{bin}/zeroth train" + kQuick + kBrief, "step 2/2"}},
    {"zeroth train --resume FILE",
     {"for i in 2 4; do {bin}/zeroth train --resume" + kQuick +
          " train.steps=$i job.threads=1 checkpoint.dir=c checkpoint.every=2; done",
      "step 2 loaded[^]*step 4/4"}},
    {"zeroth verify DIR", {kSaved + "{bin}/zeroth verify c && {bin}/zeroth show c", "step-00000002: intact, step 2"}},
    {"zeroth export DIR OUT.safetensors",
     {kSaved + "{bin}/zeroth export c out.safetensors --dtype bf16 && head -c 200 out.safetensors",
      "\"dtype\":\"BF16\""}},
    {"make fuzz", make("fuzz", "fsanitize=fuzzer")},
    {"zeroth plan FILE", {"{bin}/zeroth plan" + kQuick, "plan: zero1 \\+ adamw: .* bytes of rank 0"}},
    {"zeroth plan --params 7.5e9 --ranks 64 --compare",
     {"{bin}/zeroth plan --params 7.5e9 --ranks 64 --compare", "zero3 [^]*activations \\(unknown"}},
    {"zeroth tune --path FOLDER",
     {"ZR_MACHINE_PROFILE=machine.json {bin}/zeroth tune --path . --seconds 1 --bytes 32MiB", "chosen[^]*stored in"}},
    {"zeroth explain FILE", {"{bin}/zeroth explain" + kQuick, "steps +500 .*quickstart\\.toml:\\d+.*optimizer steps"}},
    {"zeroth explain FILE train.gradient_clipping",
     {"{bin}/zeroth explain" + kQuick + " train.gradient_clipping", "range +at least 0[^]*default +0\\.0"}},
    {"zeroth completion bash", {"{bin}/zeroth completion bash", "complete -F _zeroth zeroth"}},
    {"zeroth plugins [FILE.so]",
     {"{bin}/zeroth plugins && {bin}/zeroth plugins {bin}/../plugins/zr_strategy_zero1.so",
      "looked in [^]*strategy 'zero1'"}},
    {"zeroth explain examples/gpt/gpt.toml", {"{bin}/zeroth explain {root}/examples/gpt/gpt.toml", "learning rate"}},
    {"build/bin/zeroth train examples/quickstart/quickstart.toml",
     {"{bin}/zeroth train" + kQuick + kBrief, "step 2/2"}},
    {"build/bin/zeroth train examples/quickstart/quickstart.toml strategy=zero0 job.ranks=4",
     {"{bin}/zeroth train" + kQuick + " strategy=zero0 job.ranks=4" + kBrief, "step 2/2"}},
    {"build/bin/zeroth launch -n 2 -- build/bin/quickstart examples/quickstart/quickstart.toml",
     {"{bin}/zeroth launch -n 2 -- {bin}/quickstart" + kQuick + " train.steps=100", "step 100 loss"}},
    {"build/bin/zeroth train examples/torchscript/torchscript.toml",
     {"{bin}/zeroth train {root}/examples/torchscript/torchscript.toml train.steps=100", "step 100 loss 0\\.5"}},
    {"build/bin/gpt", {"ZR_ASK=schema {bin}/gpt", "zeroth_schema"}},
    {"build/bin/gpt_plain", in_file("examples/gpt/CMakeLists.txt", "add_executable\\(gpt_plain")},
};

std::string filled(std::string text) {
  for (const auto& [name, value] :
       {std::pair<std::string, std::string>{"{root}", ZR_SOURCE_DIR}, {"{bin}", ZR_BUILD_DIR "/bin"}})
    for (auto at = text.find(name); at != text.npos; at = text.find(name)) text.replace(at, name.size(), value);
  return text;
}

}  // namespace

TEST(ReadmeTest, TriesEveryCommand) {
  std::set<std::string> told;
  for (const std::string& file : kFiles)
    for (const std::string& command : commands_of(text_of(kRoot + file))) {
      EXPECT_TRUE(kTries.count(command)) << file << " has a command that kTries lacks: " << command;
      told.insert(command);
    }
  for (const auto& [command, how] : kTries) EXPECT_TRUE(told.count(command)) << "in no README: " << command;
  EXPECT_TRUE(told.count("make train") && told.count("make test") && told.count("make bench"));
}

TEST(ReadmeTest, EveryCommandWorks) {
  for (const auto& [command, how] : kTries) {
    const zr::test::Scratch scratch;
    const auto done = shell("cd " + scratch.folder().string() + " && " + filled(how.command));
    EXPECT_EQ(done.code, 0) << command << "\n" << filled(how.command) << "\n" << done.output;
    EXPECT_TRUE(std::regex_search(done.output, std::regex(how.says)))
        << command << " does not print " << how.says << ":\n"
        << done.output;
  }
}

TEST(ReadmeTest, ShowsTheActualPlan) {
  const auto made = shell(filled("{bin}/zeroth plan {root}/examples/gpt/gpt.toml"));
  ASSERT_EQ(made.code, 0) << made.output;
  std::istringstream lines(text_of(kRoot + "README.md"));
  int shown = 0;
  for (std::string line; std::getline(lines, line);) {
    if (shown == 0 && line.rfind("    plan: ", 0) != 0) continue;
    if (line.rfind("    step ", 0) == 0) break;
    EXPECT_NE(made.output.find(line.substr(4) + "\n"), std::string::npos) << line << " is not in\n" << made.output;
    ++shown;
  }
  EXPECT_EQ(shown, std::count(made.output.begin(), made.output.end(), '\n'));
}

TEST(ReadmeTest, FirstThreeLinesTrainAModel) {
  std::istringstream lines(text_of(kRoot + "README.md"));
  std::string toml;
  int count = 0;
  for (std::string line; std::getline(lines, line) && (count == 0 || line.rfind("    ", 0) == 0);) {
    if (line.rfind("    ", 0) != 0) continue;
    toml += trimmed(line) + "\n";
    ++count;
  }
  ASSERT_EQ(count, 3) << toml;
  const zr::test::Scratch scratch;
  scratch.write("three.toml", toml);
  const auto done =
      shell(filled("cd " + scratch.folder().string() + " && {bin}/zeroth launch -n 2 -- {bin}/quickstart three.toml"));
  ASSERT_EQ(done.code, 0) << done.output;
  const auto summary = nlohmann::json::parse(std::ifstream(scratch.path("runs/three/summary.json")));
  EXPECT_EQ(summary["steps"], 100);
  EXPECT_EQ(summary["ranks"], 2);
  EXPECT_TRUE(summary["communication_bytes"].contains("reduce_scatter")) << "the README says zero1";
}
