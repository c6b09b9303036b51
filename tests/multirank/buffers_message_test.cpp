// Golden messages: errors about buffers, and the lines that a resume prints.
#include "multirank/engine_fixture.hpp"

namespace engine_tests {
namespace {

TEST_F(EngineTest, ReportsBufferAndResumeErrors) {
  binary_ = "buffers_case";
  check_messages("buffer_errors.txt", 4);
}

TEST_F(EngineTest, RefreshPicksUpReplacedBuffersAndFailsOnAllRanks) {
  binary_ = "buffers_case";
  for (const int ranks : {1, 2})
    for (const char* name : {"replaced_and_refreshed", "refresh_fails_on_one_rank", "reaches_nothing"}) {
      if (ranks == 1 && name == std::string("refresh_fails_on_one_rank")) continue;
      const Result result = run(ranks, name, "strategy=zero1");
      EXPECT_EQ(result.code, 0) << name << " on " << ranks << "\n" << result.output;
    }
}

}  // namespace
}  // namespace engine_tests
