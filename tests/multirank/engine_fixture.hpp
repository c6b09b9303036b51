// What tests of zr::Engine share: launching engine_case, and what it leaves in its run folder.
#pragma once

#include <gtest/gtest.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "contract/shell.hpp"

namespace engine_tests {

using Json = nlohmann::json;
namespace fs = std::filesystem;

using Result = zr::testing::Outcome;

class Engine : public testing::Test {
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
  // A program that a launcher, or a shell, starts.
  std::string program(int ranks, const std::string& name, const std::string& overrides = "") const {
    return ZR_BUILD_DIR "/tests/engine_case " + name + " " + toml_ + " job.name=run job.runs=\"" + folder_.string() +
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
  // parity.toml with more at its end.
  void extend(const std::string& more) {
    std::ifstream in(toml_);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    toml_ = (folder_ / "extended.toml").string();
    std::ofstream(toml_) << text << more;
  }
  fs::path folder_;
  std::string toml_ = ZR_SOURCE_DIR "/tests/multirank/parity/parity.toml";
};

// The parameters of parity::Everything: trainable, and frozen.
struct Sizes {
  std::vector<int64_t> trainable{61 * 36, 36 * 36, 36, 577 * 36, 577, 36 * 577, 36, 36, 36, 36, 36, 36 * 36, 36, 21, 1};
  std::vector<int64_t> frozen{36 * 36, 36};
  static int64_t sum(const std::vector<int64_t>& counts) {
    int64_t total = 0;
    for (const int64_t n : counts) total += n;
    return total;
  }
  // Every parameter starts at a multiple of 32 elements.
  static int64_t aligned(const std::vector<int64_t>& counts) {
    int64_t total = 0;
    for (const int64_t n : counts) total += (n + 31) / 32 * 32;
    return total;
  }
};

}  // namespace engine_tests
