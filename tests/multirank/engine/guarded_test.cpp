// zr::guarded in processes that end by an exception which nothing can catch.
#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdio>
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

// A thread that waits for input holds the lock of its stream, without which the C library flushes no stream.
RANK_BODY(throws_while_a_thread_reads, Run) {
  run.build();
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  FILE* const input = ::fdopen(ends[0], "r");
  std::thread([input] { std::fgetc(input); }).detach();
  while (::ftrylockfile(input) == 0) {
    ::funlockfile(input);
    std::this_thread::yield();
  }
  std::thread([] { throw std::runtime_error("the data is corrupt"); }).join();
}

TEST_F(GuardedEndTest, DoesNotWaitForAThreadThatReads) {
  const Result result = run(1, throws_while_a_thread_reads, "strategy=zero1");
  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("the program threw std::runtime_error: the data is corrupt\n"));
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

// A failure that is no C++ exception, as an interpreter reports it before it destroys the engine.
RANK_BODY(reports_a_failure, Run) {
  run.build();
  run.micro_step();
  if (run.engine->rank() == run.engine->world() - 1) {
    zr::report_failure();
    run.engine.reset();
    std::exit(1);
  }
  run.train();
}

TEST_F(GuardedEndTest, AReportedFailureIsToldToTheOtherRanks) {
  const Result result = run(2, reports_a_failure, "strategy=zero1");
  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("ended with exit code 1 after step 1"));
  EXPECT_THAT(result.output, Not(HasSubstr("ran out of data")));
  EXPECT_FALSE(fs::exists(folder_ / "run" / "summary.json")) << "of a run that has failed";
  EXPECT_EQ(run(1, reports_a_failure, "strategy=zero1").code, 1);
  EXPECT_FALSE(fs::exists(folder_ / "run" / "summary.json"));
}

}  // namespace
