// Fixture of the zr::Engine tests: launches rank bodies and reads their run folders.
#pragma once

#include <gtest/gtest.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
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
  Result run(int ranks, const zr::test::RankBody& body, const std::string& overrides = "");
  static Result launch(int ranks, const std::string& words, const std::string& environment = "");
  // The command line of a rank that runs `body`, for a launcher or a shell.
  std::string program(int ranks, const zr::test::RankBody& body, const std::string& overrides = "") const;
  static Result shell(const std::string& words);
  // Trains many configurations in one launch; each line of overrides names its run with job.name.
  Result run_all(int ranks, const std::vector<std::string>& lines);
  Json summary(const std::string& name = "run") const;
  std::vector<Json> metrics(const std::string& name = "run") const;
  // Uses a copy of parity.toml with `more` appended.
  void extend(const std::string& more);
  // Compares the messages of rank bodies with a golden file. "-- run" is "RANKS BODY [key=value ...]", "-- exit" the
  // exit code unless 0, "-- says" the output. The lines are sorted, because lines of several ranks come in any order.
  // {run} is replaced by the run folder, also in "-- run"; {build} by the build folder. The comparison leaves out the
  // launcher's report of how each rank ended, because which rank the launcher sees first is a race.
  void check_messages(const std::string& file, std::size_t least_cases);
  fs::path folder_;
  std::string toml_ = ZR_SOURCE_DIR "/tests/multirank/parity/parity.toml";

 private:
  std::string rank_words(int ranks, const std::string& body, const std::string& overrides) const;
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
