// Tries every command of the README files and of docs/: each must be in the table of documented_commands.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "golden/documented_commands.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using zr::documented::commands_of;
using zr::documented::kNotTried;
using zr::documented::kTries;
using zr::testing::shell;
namespace fs = std::filesystem;

const std::string kRoot = ZR_SOURCE_DIR "/";
const std::vector<std::string> kFiles{"README.md",
                                      "CONTRIBUTING.md",
                                      "sdk/README.md",
                                      "examples/gpt/README.md",
                                      "examples/quickstart/README.md",
                                      "examples/torchscript/README.md",
                                      "examples/plugins/lion/README.md"};

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

void replace_all(std::string& text, const std::string& name, const std::string& value) {
  for (auto at = text.find(name); at != text.npos; at = text.find(name)) text.replace(at, name.size(), value);
}

// The folder of a key of kPrepared.
std::string prepared(const std::string& name);

std::string filled(std::string text) {
  for (const auto& [name, command] : zr::documented::kPrepared)
    if (text.find(name) != text.npos) replace_all(text, name, prepared(name));
  replace_all(text, "{root}", ZR_SOURCE_DIR);
  replace_all(text, "{bin}", ZR_BUILD_DIR "/bin");
  return text;
}

std::string prepared(const std::string& name) {
  static std::map<std::string, zr::test::Scratch> folders;
  const auto [at, is_new] = folders.try_emplace(name);
  const std::string folder = at->second.folder().string();
  if (is_new) {
    const auto done = shell("cd " + folder + " && " + filled(zr::documented::kPrepared.at(name)));
    EXPECT_EQ(done.code, 0) << name << "\n" << done.output;
  }
  return folder;
}

}  // namespace

TEST(ReadmeTest, TriesEveryCommand) {
  std::vector<std::string> files = kFiles;
  for (const auto& entry : fs::directory_iterator(kRoot + "docs"))
    if (entry.path().extension() == ".md") files.push_back("docs/" + entry.path().filename().string());
  std::set<std::string> shown;
  for (const std::string& file : files)
    for (const std::string& command : commands_of(text_of(kRoot + file), file.rfind("docs/", 0) == 0)) {
      EXPECT_EQ(kTries.count(command) + kNotTried.count(command), 1u)
          << file << " has a command that is not in one table of documented_commands.cpp: " << command;
      shown.insert(command);
    }
  for (const auto& [command, how] : kTries) EXPECT_TRUE(shown.count(command)) << "in no page: " << command;
  for (const auto& [command, why] : kNotTried) EXPECT_TRUE(shown.count(command)) << "in no page: " << command;
  EXPECT_TRUE(shown.count("make train") && shown.count("make test") && shown.count("mpirun -n 4 ./app job.toml"));
}

TEST(ReadmeTest, FindsCommandsInBlocksAndBackticks) {
  const std::string page =
      "Text with `zeroth train`, `zeroth plan FILE` and `a + b`:\n\n    unknown -x \\\n        -y  # explained\n\n"
      "```sh\ncd folder\n```\n\n```cpp\n    int x;\n```\n- an item\n    that continues\n";
  EXPECT_EQ(commands_of(page, true), (std::vector<std::string>{"zeroth plan FILE", "unknown -x -y", "cd folder"}));
  EXPECT_EQ(commands_of("    step 1/2\n    make test  runs tests\n`make` and `x`\n", false),
            (std::vector<std::string>{"make test", "make"}));
}

// Commands of zeroth that the text names without arguments.
TEST(ReadmeTest, NamesCommandsOfZeroth) {
  static const std::regex named("`(?:\\$HOME/zeroth/bin/)?zeroth ([a-z]+)[ `]");
  const std::string help = shell(filled("{bin}/zeroth --help")).output;
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(kRoot + "docs")) {
    const std::string text = text_of(entry.path().string());
    for (std::sregex_iterator at(text.begin(), text.end(), named), none; at != none; ++at) names.insert((*at)[1]);
  }
  for (const std::string& name : names)
    EXPECT_TRUE(std::regex_search(help, std::regex("\\b" + name + "\\b"))) << "zeroth --help has no command " << name;
  EXPECT_TRUE(names.count("train") && names.count("export"));
}

// Searches for the parts between `[^]*` one after the other: std::regex recurses once per character of a match, and an
// output is longer than the stack allows under a sanitizer.
bool prints(const std::string& output, const std::string& says) {
  static const std::string anything = "[^]*";
  auto rest = output.begin();
  for (size_t at = 0, end = 0; end != std::string::npos; at = end + anything.size()) {
    end = says.find(anything, at);
    std::smatch found;
    if (!std::regex_search(rest, output.end(), found, std::regex(says.substr(at, end - at)))) return false;
    rest = found[0].second;
  }
  return true;
}

TEST(ReadmeTest, EveryCommandWorks) {
  for (const auto& [command, how] : kTries) {
    const zr::test::Scratch scratch;
    const auto done = shell("cd " + scratch.folder().string() + " && " + filled(how.command));
    EXPECT_EQ(done.code, 0) << command << "\n" << filled(how.command) << "\n" << done.output;
    EXPECT_TRUE(prints(done.output, how.says)) << command << " does not print " << how.says << ":\n" << done.output;
  }
}

TEST(ReadmeTest, ShowsTheActualPlan) {
  const auto made = shell(filled("{bin}/zeroth plan {root}/examples/gpt/gpt.toml"));
  ASSERT_EQ(made.code, 0) << made.output;
  EXPECT_NE(text_of(kRoot + "docs/getting-started.md").find("```\n" + made.output + "```\n"), std::string::npos)
      << made.output;
}

TEST(ReadmeTest, DocsShowTheActualPlans) {
  const std::string docs = text_of(kRoot + "docs/memory-and-communication.md");
  const auto compared = shell(filled("{bin}/zeroth plan --params 1e9 --ranks 8 --dtype bf16 --compare"));
  ASSERT_EQ(compared.code, 0) << compared.output;
  EXPECT_NE(docs.find("```\n" + compared.output + "```\n"), docs.npos) << compared.output;
  const auto of_hosts =
      shell(filled("{bin}/zeroth plan --params 1e9 --hosts 4x8 --dtype bf16 --link 25Gbit strategy=zero3 | "
                   "grep -A 99 '^communication per step, 4 hosts'"));
  EXPECT_NE(docs.find("```\n" + of_hosts.output + "```\n"), docs.npos) << of_hosts.output;
}

// Each TOML block of docs/ is valid, with a strategy, an optimizer and a program if it has none. tests/package trains
// the job of getting-started.md, whose program is on the same page.
TEST(ReadmeTest, DocsShowValidToml) {
  static const std::regex block("```toml\n([^`]+)```"), table("(^|\n)\\[optimizer\\]");
  int checked = 0;
  for (const auto& entry : fs::directory_iterator(kRoot + "docs")) {
    const std::string text = text_of(entry.path().string());
    for (std::sregex_iterator at(text.begin(), text.end(), block), none; at != none; ++at) {
      const std::string toml = (*at)[1];
      if (toml.find("program = \"app\"") != toml.npos) continue;
      const zr::test::Scratch scratch;
      scratch.write("job.toml", toml);
      std::string command = "cd " + scratch.folder().string() + " && ";
      if (toml.find("use = \"descent\"") != toml.npos)
        command += kTries.at("chmod go-w zr_optimizer_descent.so").command + " && export ZR_PLUGIN_PATH=$PWD && ";
      command += "{bin}/zeroth explain job.toml job.program={bin}/quickstart communicator=shm";
      if (toml.find("strategy = ") == toml.npos) command += " strategy=zero1";
      if (!std::regex_search(toml, table)) command += " optimizer=adamw";
      const auto done = shell(filled(command));
      EXPECT_EQ(done.code, 0) << entry.path() << "\n" << toml << "\n" << done.output;
      ++checked;
    }
  }
  EXPECT_GE(checked, 5);
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
