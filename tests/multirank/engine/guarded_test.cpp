// zr::guarded in processes that end by an exception which nothing can catch.
#include <gmock/gmock.h>

#include <latch>
#include <stdexcept>
#include <thread>
#include <vector>

#include "support/engine_test.hpp"

namespace {

using namespace engine_tests;
using ::testing::HasSubstr;
using ::testing::Not;

class GuardedEndTest : public EngineTest {};

RANK_BODY(throws_in_several_threads, Run) {
  run.build();
  std::vector<std::thread> threads;
  std::latch together(8);
  const auto fail = [&together] {
    together.arrive_and_wait();
    throw std::runtime_error("the device is lost");
  };
  for (int i = 0; i < 8; ++i) threads.emplace_back(fail);
  for (std::thread& thread : threads) thread.join();
}

TEST_F(GuardedEndTest, ReportsTheFirstOfSeveralThreadsThatThrow) {
  for (int i = 0; i < 5; ++i) {
    const Result result = run(1, throws_in_several_threads, "strategy=zero1");
    EXPECT_EQ(result.code, 1) << result.output;
    const std::string text = "zeroth: error: the program threw std::runtime_error: the device is lost\n";
    EXPECT_THAT(result.output, HasSubstr(text));
    EXPECT_EQ(result.output.find(text), result.output.rfind(text)) << "once";
  }
}

// A thread that is neither joined nor detached ends the process without an exception.
RANK_BODY(forgets_a_thread, Run) {
  run.build();
  EXPECT_EQ(zr::guarded([] {}), 0);
  const std::thread forgotten([] {});
}

TEST_F(GuardedEndTest, LeavesOtherEndsOfTheProcessAsTheyAre) {
  const Result result = run(1, forgets_a_thread, "strategy=zero1");
  EXPECT_EQ(result.code, 4) << result.output;
  EXPECT_THAT(result.output, HasSubstr("was killed by signal 6 (SIGABRT)"));
  EXPECT_THAT(result.output, Not(HasSubstr("the program threw")));
}

}  // namespace
