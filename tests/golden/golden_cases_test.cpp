// The comparison of golden files (tests/support/golden_cases.hpp).
#include "support/golden_cases.hpp"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>

#include "support/scratch.hpp"

namespace zr::golden {
namespace {

// ZR_UPDATE_GOLDEN for one test, whatever it is for the program.
class UpdateVariable {
 public:
  explicit UpdateVariable(bool updates) {
    if (const char* value = std::getenv(kName)) before_ = value;
    updates ? ::setenv(kName, "1", 1) : ::unsetenv(kName);
  }
  ~UpdateVariable() { before_ ? ::setenv(kName, before_->c_str(), 1) : ::unsetenv(kName); }

 private:
  static constexpr const char* kName = "ZR_UPDATE_GOLDEN";
  std::optional<std::string> before_;
};

class GoldenCasesTest : public testing::Test {
 protected:
  // Checks a file whose only case expects `expected` (no "says" part if empty) while the program prints `printed`.
  void check_one(bool updates, const std::string& expected, const std::string& printed) {
    const UpdateVariable variable(updates);
    std::ofstream(path()) << "One case.\n\n== the case\n-- run\nprogram\n"
                          << (expected.empty() ? "" : "-- says\n" + expected + "\n");
    check(path(), 1, [&](const Case&) { return std::vector<ProducedPart>{{"exit", ""}, {"says", printed}}; });
  }
  std::string path() const { return scratch_.path("cases.txt"); }

 private:
  test::Scratch scratch_;
};

TEST_F(GoldenCasesTest, FailsForAnotherText) {
  check_one(false, "one", "one");
  EXPECT_NONFATAL_FAILURE(check_one(false, "one", "two"), "case: the case, part: says");
}

TEST_F(GoldenCasesTest, UpdatesAnotherText) {
  check_one(true, "one", "two");
  EXPECT_EQ(read_file(path()).cases.at(0)["says"], "two");
}

TEST_F(GoldenCasesTest, FailsForACaseThatExpectsNoText) {
  EXPECT_NONFATAL_FAILURE(check_one(false, "", ""), "case: the case: the case expects no text");
  EXPECT_NONFATAL_FAILURE(check_one(true, "", ""), "case: the case: the case expects no text");
  EXPECT_NONFATAL_FAILURE(check_one(true, "one", ""), "case: the case: the case expects no text");
}

TEST_F(GoldenCasesTest, AcceptsSkippedCases) {
  std::ofstream(path()) << "One case.\n\n== the case\n-- run\nprogram\n";
  check(path(), 1, [](const Case&) { return std::vector<ProducedPart>{}; });
}

}  // namespace
}  // namespace zr::golden
