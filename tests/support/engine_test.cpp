#include "support/engine_test.hpp"

#include <algorithm>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "support/golden_cases.hpp"
#include "support/job_command.hpp"

namespace engine_tests {

Result EngineTest::run(int ranks, const zr::test::RankBody& body, const std::string& overrides) {
  return launch(ranks, program(ranks, body, overrides + " job.threads=1"));
}

Result EngineTest::launch(int ranks, const std::string& words, const std::string& environment) {
  return shell(environment + " " ZR_BUILD_DIR "/bin/zeroth launch -n " + std::to_string(ranks) + " -- " + words);
}

std::string EngineTest::program(int ranks, const zr::test::RankBody& body, const std::string& overrides) const {
  return rank_words(ranks, body.name(), overrides);
}

std::string EngineTest::rank_words(int ranks, const std::string& body, const std::string& overrides) const {
  return zr::test::rank_command(body) + " " + toml_ + " job.name=run job.runs=\"" + folder_.string() +
         "\" job.ranks=" + std::to_string(ranks) + " " + overrides;
}

Result EngineTest::shell(const std::string& words) {
  return zr::test::run_job_command(words, fs::current_path(), {{"ZR_PLUGIN_PATH", ZR_BUILD_DIR "/tests/plugins"}});
}

Result EngineTest::run_all(int ranks, const std::vector<std::string>& lines) {
  std::ofstream list(folder_ / "list");
  for (const auto& line : lines) list << line << "\n";
  list.close();
  return launch(ranks, program(ranks, trains_list, "job.threads=1"), "TRAINS_LIST=" + (folder_ / "list").string());
}

Json EngineTest::summary(const std::string& name) const {
  std::ifstream in(folder_ / name / "summary.json");
  return Json::parse(in);
}

std::vector<Json> EngineTest::metrics(const std::string& name) const {
  std::ifstream in(folder_ / name / "metrics.jsonl");
  std::vector<Json> rows;
  for (std::string line; std::getline(in, line);) rows.push_back(Json::parse(line));
  return rows;
}

void EngineTest::extend(const std::string& more) {
  std::ifstream in(toml_);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  toml_ = (folder_ / "extended.toml").string();
  std::ofstream(toml_) << text << more;
}

void EngineTest::check_messages(const std::string& file, std::size_t least_cases) {
  zr::golden::check(ZR_SOURCE_DIR "/tests/golden/" + file, least_cases, [&](const zr::golden::Case& one) {
    if (zr::test::jobs_run_on_hosts() && !one["one host"].empty()) {
      std::cout << "one host only: " << one["one host"] << " (" << one.title << ")\n";
      return std::vector<zr::golden::ProducedPart>{};
    }
    const std::string run = std::regex_replace(one["run"], std::regex("\\{run\\}"), folder_.string());
    std::istringstream words(std::regex_replace(run, std::regex("\\{build\\}"), ZR_BUILD_DIR));
    int ranks = 1;
    std::string name, overrides;
    words >> ranks >> name;
    std::getline(words, overrides);
    EXPECT_TRUE(zr::test::RankBody::exists(name)) << "no rank body has the name '" << name << "'";
    Result result = launch(ranks, rank_words(ranks, name, overrides + " job.threads=1"));
    EXPECT_NE(result.code, zr::test::kFailedAssertion) << one.title << "\n" << result.output;
    for (const auto& [path, name] :
         {std::pair<std::string, std::string>{folder_.string(), "{run}"}, {ZR_BUILD_DIR, "{build}"}})
      for (auto at = result.output.find(path); at != std::string::npos; at = result.output.find(path))
        result.output.replace(at, path.size(), name);
    auto lines = result.lines();
    const std::regex report(
        "^  rank [0-9]+  pid .*|.*the job has failed; its ranks:|.*\\(pid [0-9]+\\) ended .*|.*\\(pid [0-9]+\\) was "
        "killed .*");
    std::erase_if(lines, [&](const std::string& line) { return std::regex_match(line, report); });
    for (auto& line : lines) line = std::regex_replace(line, std::regex("^\\[[0-9]+\\] "), "");
    std::sort(lines.begin(), lines.end());
    lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
    std::string all;
    for (const auto& line : lines) all += (all.empty() ? "" : "\n") + line;
    return std::vector<zr::golden::ProducedPart>{{"exit", result.code == 0 ? "" : std::to_string(result.code)},
                                                 {"says", all}};
  });
}

}  // namespace engine_tests
