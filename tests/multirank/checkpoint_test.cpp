// Checkpoints through the engine: any strategy and number of ranks saves, any other goes on, bit for bit.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "contract/shell.hpp"
#include "scratch.hpp"

namespace {

using Json = nlohmann::json;
using zr::testing::shell;

const std::vector<std::string> kStrategies{"zero0", "zero1", "zero2", "zero3"};
const std::vector<int> kWorlds{1, 2, 3, 4, 8};

class Checkpoints : public testing::Test {
 protected:
  // A job a line, all of them on n ranks; 24 micro-batches a step however many ranks share them.
  void run(int n, const std::string& lines, const std::string& overrides = "") {
    const auto done =
        shell("cd " + scratch_.folder().string() + " && ENGINE_CASE_LIST=" + scratch_.write("list", lines) +
              " " ZR_BUILD_DIR "/bin/zeroth launch -n " + std::to_string(n) +
              " -t 1 -- " ZR_BUILD_DIR "/tests/engine_case trains_list " ZR_SOURCE_DIR
              "/tests/multirank/parity/parity.toml train.steps=4 job.threads=1 train.accumulation=" +
              std::to_string(24 / n) + " " + overrides);
    ASSERT_EQ(done.code, 0) << done.output;
  }
  Json summary(const std::string& name) const {
    return Json::parse(std::ifstream(scratch_.path("runs/" + name + "/summary.json")), nullptr, false);
  }
  std::map<int64_t, double> losses(const std::string& name) const {
    std::map<int64_t, double> all;
    std::ifstream rows(scratch_.path("runs/" + name + "/metrics.jsonl"));
    for (std::string row; std::getline(rows, row);) {
      const Json json = Json::parse(row);
      all[json["step"].get<int64_t>()] = json["loss"].get<double>();
    }
    return all;
  }
  // Saves at step 2 under every strategy and number of ranks, goes on under every other to step 4.
  void expect_all_pairs(const std::string& overrides) {
    run(1, "job.name=whole strategy=zero0\n", overrides);
    const std::string hash = summary("whole")["weights_hash"];
    const auto whole = losses("whole");
    const auto folder = [](const std::string& strategy, int n) {
      return "saved-" + strategy + "-" + std::to_string(n);
    };
    for (const int n : kWorlds) {
      std::string lines;
      for (const std::string& strategy : kStrategies)
        lines += "job.name=" + folder(strategy, n) + " strategy=" + strategy +
                 " checkpoint.dir=" + folder(strategy, n) + " checkpoint.every=2 train.steps=2\n";
      run(n, lines, overrides);
    }
    for (const int m : kWorlds) {
      std::string lines;
      for (const std::string& to : kStrategies)
        for (const std::string& from : kStrategies)
          for (const int n : kWorlds)
            lines += "job.name=on-" + to + "-" + std::to_string(m) + "-" + folder(from, n) + " strategy=" + to +
                     " checkpoint.resume=true checkpoint.dir=" + folder(from, n) + "\n";
      run(m, lines, overrides);
      for (const std::string& to : kStrategies)
        for (const std::string& from : kStrategies)
          for (const int n : kWorlds) {
            const std::string name = "on-" + to + "-" + std::to_string(m) + "-" + folder(from, n);
            EXPECT_EQ(summary(name)["weights_hash"], hash) << name;
            const auto rest = losses(name);
            EXPECT_EQ(rest, (std::map<int64_t, double>{{3, whole.at(3)}, {4, whole.at(4)}})) << name;
          }
    }
  }
  const zr::test::Scratch scratch_;
};

TEST_F(Checkpoints, OfAnyStrategyAndNumberOfRanksGoOnUnderAnyOther) { expect_all_pairs("parity.model=everything"); }

TEST_F(Checkpoints, InBf16KeepMastersAndStates) {
  const std::string how = "parity.model=everything train.dtype=bf16 strategy=zero2 ";
  run(2, "job.name=whole\n", how);
  run(3, "job.name=first train.steps=2 checkpoint.dir=c checkpoint.every=1\n", how);
  run(4, "job.name=rest checkpoint.dir=c checkpoint.resume=true\n", how);
  EXPECT_EQ(summary("rest")["weights_hash"], summary("whole")["weights_hash"]);
}

TEST_F(Checkpoints, StayAsManyAsAreToBeKept) {
  run(2, "job.name=a checkpoint.dir=c checkpoint.every=1 checkpoint.keep=2\n", "parity.model=tiny");
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(scratch_.path("c")))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"lock", "step-00000003", "step-00000004"}));
  const auto verified = shell(ZR_BUILD_DIR "/bin/zeroth verify " + scratch_.path("c"));
  EXPECT_EQ(verified.code, 0) << verified.output;
  EXPECT_NE(verified.output.find("step-00000004: whole, step 4, "), std::string::npos) << verified.output;
}

}  // namespace
