// Fixture of the zr::Engine tests: launches rank bodies and reads their run folders.
#pragma once

#include <gtest/gtest.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "support/golden_cases.hpp"
#include "support/multirank.hpp"
#include "support/shell.hpp"
#include "support/train_bodies.hpp"

namespace engine_tests {

using Json = nlohmann::json;
namespace fs = std::filesystem;

using Result = zr::testing::Outcome;

class EngineTest : public testing::Test {
 public:
  using Run = engine_tests::Run;

 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("engine-" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  // Launches a job whose ranks run `body`.
  Result run(int ranks, const zr::test::RankBody& body, const std::string& overrides = "") {
    return launch(ranks, program(ranks, body, overrides + " job.threads=1"));
  }
  static Result launch(int ranks, const std::string& words, const std::string& environment = "") {
    return shell(environment + " " ZR_BUILD_DIR "/bin/zeroth launch -n " + std::to_string(ranks) + " -- " + words);
  }
  // The command line of a rank that runs `body`, for a launcher or a shell.
  std::string program(int ranks, const zr::test::RankBody& body, const std::string& overrides = "") const {
    return program(ranks, body.name(), overrides);
  }
  std::string program(int ranks, const std::string& body, const std::string& overrides) const {
    return zr::test::rank_command(body) + " " + toml_ + " job.name=run job.runs=\"" + folder_.string() +
           "\" job.ranks=" + std::to_string(ranks) + " " + overrides;
  }
  static Result shell(const std::string& words) {
    return zr::testing::shell("export ZR_PLUGIN_PATH=" ZR_BUILD_DIR "/tests/plugins; (" + words + ")");
  }
  // Trains many configurations in one launch; each line of overrides names its run with job.name.
  Result run_all(int ranks, const std::vector<std::string>& lines) {
    std::ofstream list(folder_ / "list");
    for (const auto& line : lines) list << line << "\n";
    list.close();
    return launch(ranks, program(ranks, trains_list, "job.threads=1"), "TRAINS_LIST=" + (folder_ / "list").string());
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
  // Compares the messages of rank bodies with a golden file. "-- run" is "RANKS BODY [key=value ...]", "-- exit" the
  // exit code unless 0, "-- says" the output. The lines are sorted, because lines of several ranks come in any order.
  // {run} is replaced by the run folder, also in "-- run". The comparison leaves out the launcher's report of how each
  // rank ended, because which rank the launcher sees first is a race.
  void check_messages(const std::string& file, std::size_t least_cases) {
    zr::golden::check(ZR_SOURCE_DIR "/tests/golden/" + file, least_cases, [&](const zr::golden::Case& one) {
      std::istringstream words(std::regex_replace(one["run"], std::regex("\\{run\\}"), folder_.string()));
      int ranks = 1;
      std::string name, overrides;
      words >> ranks >> name;
      std::getline(words, overrides);
      EXPECT_TRUE(zr::test::RankBody::exists(name)) << "no rank body has the name '" << name << "'";
      Result result = launch(ranks, program(ranks, name, overrides + " job.threads=1"));
      EXPECT_NE(result.code, zr::test::kFailedAssertion) << one.title << "\n" << result.output;
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
