// Fixture of the zr::Engine tests: launches engine_case and reads its run folder.
#pragma once

#include <gtest/gtest.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "contract/shell.hpp"
#include "golden/cases.hpp"

namespace engine_tests {

using Json = nlohmann::json;
namespace fs = std::filesystem;

using Result = zr::testing::Outcome;

class EngineTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("engine-" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  Result run(int ranks, const std::string& name, const std::string& overrides = "", const std::string& list = "") {
    return shell("ENGINE_CASE_LIST=" + list + " " ZR_BUILD_DIR "/bin/zeroth launch -n " + std::to_string(ranks) +
                 " -- " + program(ranks, name, overrides + " job.threads=1"));
  }
  // The command line of the rank program, for a launcher or a shell.
  std::string program(int ranks, const std::string& name, const std::string& overrides = "") const {
    return ZR_BUILD_DIR "/tests/" + binary_ + " " + name + " " + toml_ + " job.name=run job.runs=\"" +
           folder_.string() + "\" job.ranks=" + std::to_string(ranks) + " " + overrides;
  }
  static Result shell(const std::string& words) {
    return zr::testing::shell("export ZR_PLUGIN_PATH=" ZR_BUILD_DIR "/tests/plugins; (" + words + ")");
  }
  // Trains many configurations in one launch; each line of overrides names its run with job.name.
  Result run_all(int ranks, const std::vector<std::string>& lines) {
    std::ofstream list(folder_ / "list");
    for (const auto& line : lines) list << line << "\n";
    list.close();
    return run(ranks, "trains_list", "", (folder_ / "list").string());
  }
  Json summary(const std::string& name = "run") const {
    std::ifstream in(folder_ / name / "summary.json");
    return Json::parse(in);
  }
  std::vector<Json> metrics(const std::string& name = "run") const {
    std::ifstream in(folder_ / name / "metrics.jsonl");
    std::vector<Json> rows;
    for (std::string line; std::getline(in, line);) rows.push_back(Json::parse(line));
    return rows;
  }
  // Uses a copy of parity.toml with `more` appended.
  void extend(const std::string& more) {
    std::ifstream in(toml_);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    toml_ = (folder_ / "extended.toml").string();
    std::ofstream(toml_) << text << more;
  }
  // Compares the messages of the rank program binary_ with a golden file. "-- run" is "RANKS CASE [key=value ...]",
  // "-- exit" the exit code unless 0, "-- says" the output. The lines are sorted, because lines of several ranks come
  // in any order. {run} is replaced by the run folder, also in "-- run". The comparison leaves out the launcher's
  // report of how each rank ended, because which rank the launcher sees first is a race.
  void check_messages(const std::string& file, std::size_t least_cases) {
    zr::golden::check(ZR_SOURCE_DIR "/tests/golden/" + file, least_cases, [&](const zr::golden::Case& one) {
      std::istringstream words(std::regex_replace(one["run"], std::regex("\\{run\\}"), folder_.string()));
      int ranks = 1;
      std::string name, overrides;
      words >> ranks >> name;
      std::getline(words, overrides);
      Result result = run(ranks, name, overrides);
      for (auto at = result.output.find(folder_.string()); at != std::string::npos; at = result.output.find(folder_))
        result.output.replace(at, folder_.string().size(), "{run}");
      auto lines = result.lines();
      const std::regex report("^  rank [0-9]+  pid .*|.*\\(pid [0-9]+\\) ended .*|.*\\(pid [0-9]+\\) was killed .*");
      std::erase_if(lines, [&](const std::string& line) { return std::regex_match(line, report); });
      for (auto& line : lines) line = std::regex_replace(line, std::regex("^\\[[0-9]+\\] "), "");
      std::sort(lines.begin(), lines.end());
      lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
      std::string all;
      for (const auto& line : lines) all += (all.empty() ? "" : "\n") + line;
      return std::vector<zr::golden::Part>{{"exit", result.code == 0 ? "" : std::to_string(result.code)},
                                           {"says", all}};
    });
  }
  std::string binary_ = "engine_case";  // in build/tests
  fs::path folder_;
  std::string toml_ = ZR_SOURCE_DIR "/tests/multirank/parity/parity.toml";
};

// Element counts of the trainable and the frozen parameters of parity::Everything.
struct Sizes {
  std::vector<int64_t> trainable{61 * 36, 36 * 36, 36, 577 * 36, 577, 36 * 577, 36, 36, 36, 36, 36, 36 * 36, 36, 21, 1};
  std::vector<int64_t> frozen{36 * 36, 36};
  static int64_t sum(const std::vector<int64_t>& counts) {
    int64_t total = 0;
    for (const int64_t n : counts) total += n;
    return total;
  }
  // The total when every parameter starts at a multiple of 32 elements.
  static int64_t aligned(const std::vector<int64_t>& counts) {
    int64_t total = 0;
    for (const int64_t n : counts) total += (n + 31) / 32 * 32;
    return total;
  }
};

}  // namespace engine_tests
