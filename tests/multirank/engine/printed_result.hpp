// Fixture of tests that compare what rank bodies print: the weights hash of jobs under several strategies.
#pragma once

#include <set>

#include "support/engine_test.hpp"
#include "support/layouts.hpp"

namespace engine_tests {

using zr::test::kLayouts;

class PrintedResultTest : public EngineTest {
 protected:
  // What all ranks print on lines with "result"; the test fails if two lines differ.
  std::string result_of(int ranks, const zr::test::RankBody& body, const std::string& overrides) {
    const Result done = run(ranks, body, overrides);
    EXPECT_EQ(done.code, 0) << overrides << "\n" << done.output;
    std::set<std::string> results;
    std::istringstream lines(done.output);
    for (std::string line; std::getline(lines, line);)
      if (const auto at = line.find("result "); at != line.npos) results.insert(line.substr(at));
    EXPECT_EQ(results.size(), 1u) << done.output;
    return results.empty() ? "" : *results.begin();
  }
};

inline void print_hash(Run& run) {
  const std::string hash = run.engine->weights_hash();
  std::cout << "result " + hash + "\n" << std::flush;
}

}  // namespace engine_tests
