// `zeroth conform`: every plug-in of this tree follows the rules, and each plug-in with a defect breaks the rule about
// it.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "support/golden_cases.hpp"
#include "support/shell.hpp"

namespace zr::testing {
namespace {

namespace fs = std::filesystem;

const std::string kConform = ZR_BUILD_DIR "/bin/zeroth-conform", kMutants = ZR_BUILD_DIR "/tests/mutants";
const std::string kContract = ZR_SOURCE_DIR "/tests/contract";

// The report of zeroth-conform, and its exit code.
struct Report {
  int code;
  nlohmann::json json;
  std::set<std::string> failed() const {
    std::set<std::string> rules;
    for (const auto& one : json["cases"])
      if (one["result"] == "failed") rules.insert(one["rule"]);
    return rules;
  }
  // The rules that were skipped, each with its reason.
  std::set<std::string> skips() const {
    std::set<std::string> lines;
    for (const auto& one : json["cases"])
      if (one["result"] == "skipped") lines.insert(std::string(one["rule"]) + " " + std::string(one["reason"]));
    return lines;
  }
  std::string reasons() const {
    std::string text;
    for (const auto& one : json["cases"])
      if (one["result"] == "failed") text += std::string(one["rule"]) + ": " + std::string(one["reason"]) + "\n";
    return text;
  }
};
Report check(const std::string& file, const std::string& options = "") {
  const Outcome outcome = shell(kConform + " " + file + " --json - " + options);
  return {outcome.code, nlohmann::json::parse(outcome.output, nullptr, false)};
}

std::string name_of_file(const std::string& file) {
  std::string name = fs::path(file).stem();
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

// ---- plug-ins without defects

// The libraries of the zoo. Those of communicators and strategies are slow to check.
std::vector<std::string> zoo(bool slow) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(kContract + "/zoo")) {
    const std::string name = entry.path().filename();
    const bool is_slow = name.find("communicator") != name.npos || name.find("strategy") != name.npos;
    if (entry.path().extension() == ".so" && is_slow == slow) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// The lines of conform_skips.txt about a plug-in: a rule and a reason each.
std::set<std::string> permitted_skips(const std::string& plugin) {
  std::set<std::string> lines;
  std::ifstream in(kContract + "/conform_skips.txt");
  for (std::string line; std::getline(in, line);)
    if (line.rfind(plugin + " ", 0) == 0) lines.insert(line.substr(plugin.size() + 1));
  return lines;
}

const auto name_of_plugin = [](const auto& info) { return info.param; };

class ConformShipped : public ::testing::TestWithParam<std::string> {};
TEST_P(ConformShipped, FollowsAllRules) {
  const Report report = check(ZR_BUILD_DIR "/plugins/zr_" + GetParam() + ".so");
  EXPECT_EQ(report.code, 0) << report.reasons();
  EXPECT_EQ(report.skips(), permitted_skips(GetParam()));
}
INSTANTIATE_TEST_SUITE_P(Plugins, ConformShipped,
                         ::testing::Values("communicator_shm", "offload_cpu", "offload_nvme", "optimizer_adafactor",
                                           "optimizer_adamw", "optimizer_adamw8bit", "optimizer_lamb", "optimizer_muon",
                                           "optimizer_onebit_adam", "optimizer_sgd", "strategy_zero2",
                                           "strategy_zero3"),
                         name_of_plugin);
INSTANTIATE_TEST_SUITE_P(SLOW_Plugins, ConformShipped, ::testing::Values("strategy_zero0", "strategy_zero1"),
                         name_of_plugin);

class ConformZoo : public ::testing::TestWithParam<std::string> {};
TEST_P(ConformZoo, FollowsAllRules) {
  const Report report = check(GetParam());
  EXPECT_EQ(report.code, 0) << report.reasons();
}
const auto name_of_library = [](const auto& info) { return name_of_file(info.param); };
INSTANTIATE_TEST_SUITE_P(Plugins, ConformZoo, ::testing::ValuesIn(zoo(false)), name_of_library);
INSTANTIATE_TEST_SUITE_P(SLOW_Plugins, ConformZoo, ::testing::ValuesIn(zoo(true)), name_of_library);

// ---- plug-ins with defects

struct Defect {
  std::string role, name, rule;  // rule: "" for the plug-in without a defect
  std::set<std::string> also;    // rules that cannot hold either; "*": any
};
std::ostream& operator<<(std::ostream& out, const Defect& defect) { return out << defect.role << " " << defect.name; }

std::vector<Defect> defects() {
  std::vector<Defect> all;
  std::ifstream in(kContract + "/mutants/defects.txt");
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    Defect defect;
    words >> defect.role >> defect.name >> defect.rule;
    for (std::string rule; words >> rule;) defect.also.insert(rule);
    all.push_back(defect);
  }
  return all;
}

// A short limit for plug-ins that do not return.
std::string time_limit(const Defect& defect) {
  return defect.name.rfind("hangs_in_", 0) == 0 ? "--time-limit 3 " : "--time-limit 25 ";
}

class ConformMutant : public ::testing::TestWithParam<Defect> {
 protected:
  static Report check_mutant(const std::string& options) {
    const std::string role = GetParam().role;
    return check(kMutants + "/" + role + "/" + GetParam().name + "/zr_" + role + "_mutant.so", options);
  }
};
TEST_P(ConformMutant, BreaksItsRule) {
  const std::string rule = GetParam().rule;
  const Report report = check_mutant(time_limit(GetParam()) + (rule.empty() ? "" : "--rule " + rule));
  EXPECT_EQ(report.code, rule.empty() ? 0 : 2);
  EXPECT_EQ(report.failed(), rule.empty() ? std::set<std::string>() : std::set<std::string>{rule}) << report.reasons();
}
// All rules: `make test-all`.
TEST_P(ConformMutant, BreaksNoOtherRule) {
  const auto& [role, name, rule, also] = GetParam();
  const Report report = check_mutant(time_limit(GetParam()));
  std::set<std::string> failed = report.failed();
  EXPECT_EQ(report.code, rule.empty() ? 0 : 2);
  EXPECT_EQ(failed.erase(rule), rule.empty() ? 0u : 1u) << rule << " does not find the defect";
  for (const std::string& other : failed)
    EXPECT_TRUE(also.count(other) || also.count("*")) << other << " fails too\n" << report.reasons();
}
INSTANTIATE_TEST_SUITE_P(SLOW_Defects, ConformMutant, ::testing::ValuesIn(defects()),
                         [](const auto& info) { return info.param.role + "_" + info.param.name; });

// ---- the command

TEST(ConformRules, EveryRuleFindsADefect) {
  std::set<std::string> unproven, proven;
  for (const Defect& defect : defects()) proven.insert(defect.rule);
  for (const std::string& line : shell(kConform + " --list").lines())
    if (!proven.count(line.substr(0, 6))) unproven.insert(line.substr(0, 6));
  EXPECT_EQ(unproven, std::set<std::string>());
}

TEST(ConformRules, AreListedInTheDocumentation) {
  std::ifstream in(ZR_SOURCE_DIR "/docs/conformance.md");
  std::set<std::string> documented;
  for (std::string line; std::getline(in, line);)
    if (line.rfind("| `ZR-", 0) == 0) documented.insert(line);
  std::set<std::string> listed;
  for (const std::string& line : shell(kConform + " --list").lines()) {
    std::string role = line.substr(8, 14);
    role.erase(role.find_last_not_of(' ') + 1);
    listed.insert("| `" + line.substr(0, 6) + "` | " + role + " | " + line.substr(22) + " |");
  }
  EXPECT_EQ(documented, listed);
}

TEST(ConformRules, ZerothHasTheSameRules) {
  EXPECT_EQ(shell(ZR_BUILD_DIR "/bin/zeroth conform --list").output, shell(kConform + " --list").output);
}

// An optimizer for the simulated device follows the rules in host memory; the rest needs the device.
TEST(ConformReport, SaysWhatNeedsADevice) {
  const std::string file = ZR_BUILD_DIR "/tests/plugins/sim/zr_optimizer_adamw.so";
  if (!fs::exists(file)) GTEST_SKIP() << "built with libtorch only";
  const Report report = check(file);
  EXPECT_EQ(report.code, 0) << report.reasons();
  std::string remarks;
  for (const auto& one : report.json["cases"])
    if (one.contains("remark")) remarks += std::string(one["rule"]) + ": " + std::string(one["remark"]) + "\n";
  EXPECT_EQ(remarks,
            "ZR-O24: not checked here: step() with a stream, and norm_blocks(), which need a device of type 12\n");
}

// One that also moves host memory through its device: what opens it is skipped.
TEST(ConformReport, SkipsWhatOpensADevice) {
  const std::string file = ZR_BUILD_DIR "/tests/plugins/sim/zr_communicator_nccl.so";
  if (!fs::exists(file)) GTEST_SKIP() << "built with libtorch only";
  const Report report = check(file);
  EXPECT_EQ(report.code, 0) << report.reasons();
  EXPECT_GT(report.json["passed"], 10);
  int opens = 0;
  for (const std::string& line : report.skips())
    opens += line.find("it cannot be checked without a device: open() returned ZR_UNSUPPORTED") != std::string::npos;
  EXPECT_GT(opens, 20);
}

TEST(ConformReport, MatchesGoldenFile) {
  const std::string path = kContract + "/conform.txt";
  golden::File file = golden::read_file(path);
  for (golden::Case& one : file.cases) {
    std::string output = shell("cd " + kMutants + " && " + ZR_BUILD_DIR "/bin/" + one["run"]).output;
    golden::trim_newlines(output);
    if (golden::updates()) one.set("out", output);
    EXPECT_EQ(one["out"], output) << one.title;
  }
  if (golden::updates()) golden::write_file(path, file);
}

}  // namespace
}  // namespace zr::testing
