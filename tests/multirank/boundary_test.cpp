// Checks when engine.get, set, save, load and step may be called. Rejected calls change nothing under any strategy.
#include "multirank/engine_fixture.hpp"

namespace {

using namespace engine_tests;

const std::vector<std::string> kStrategies{"zero0", "zero1 communicator.share_weights=false", "zero1",
                                           "zero2", "zero3 communicator.share_weights=false", "zero3"};

class BoundaryTest : public EngineTest {
 protected:
  BoundaryTest() { binary_ = "boundary_case"; }
  // The line that rank 0 prints, from `word` on.
  std::string printed(int ranks, const std::string& name, const std::string& overrides, const std::string& word) {
    const Result result = run(ranks, name, overrides);
    EXPECT_EQ(result.code, 0) << overrides << "\n" << result.output;
    const auto at = result.output.find(word + " ");
    if (at == std::string::npos) return "";
    return result.output.substr(at, result.output.find('\n', at) - at);
  }
};

TEST_F(BoundaryTest, RejectedCallInsideGatherScopeDoesNotChangeResults) {
  const std::string expected = printed(2, "trains", "strategy=zero0 train.steps=4", "result");
  ASSERT_NE(expected, "");
  for (const std::string& strategy : kStrategies)
    EXPECT_EQ(printed(2, "calls_inside_scope", "strategy=" + strategy + " train.steps=4", "result"), expected)
        << strategy;
}

TEST_F(BoundaryTest, GradientAfterStepIsIdenticalOnEveryRankAndStrategy) {
  for (const std::string accumulation : {"1", "2"}) {
    std::string expected;
    for (const std::string& strategy : kStrategies) {
      const std::string sum = printed(
          2, "reads_gradients", "strategy=" + strategy + " train.gradient_accumulation=" + accumulation, "gradient");
      ASSERT_NE(sum, "") << strategy;
      if (expected.empty()) expected = sum;
      EXPECT_EQ(sum, expected) << strategy << ", accumulation " << accumulation;
    }
  }
}

TEST_F(BoundaryTest, ErrorsNameCallReasonAndRemedy) { check_messages("boundary_errors.txt", 12); }

}  // namespace
