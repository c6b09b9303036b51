// Mistakes with buffers, and what a resume prints, word for word.
#include "multirank/engine_fixture.hpp"

namespace engine_tests {
namespace {

TEST_F(Engine, ReportsMistakesWithBuffersAndResume) {
  binary_ = "buffers_case";
  check_messages("buffer_errors.txt", 4);
}

}  // namespace
}  // namespace engine_tests
