#include "cli/launch_output.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "support/scratch.hpp"

namespace zr::host::cli {
namespace {

// The standard error of the launcher after `job` has written to it.
template <class Job>
std::string written(const Job& job) {
  const test::Scratch scratch;
  const std::string out = scratch.write("out", ""), err = scratch.write("err", "");
  const int out_fd = ::open(out.c_str(), O_WRONLY), err_fd = ::open(err.c_str(), O_WRONLY);
  {
    OutputWriter writer;
    Output output(writer, out_fd, err_fd, 2, true);
    job(output);
    output.finish();
    writer.start();
    writer.flush();
  }
  ::close(out_fd);
  ::close(err_fd);
  std::ostringstream text;
  text << std::ifstream(err).rdbuf();
  return text.str();
}

TEST(LaunchOutputTest, FirstCauseOfAFailureIsTheLastLine) {
  const std::string report =
      "rank 1 (pid 7) ended with exit code 2\n  rank 0  pid 6  computing\n  rank 1  pid 7  ended";
  EXPECT_EQ(written([&](Output& output) {
              output.bytes(1, Output::err, "zeroth: error: data.txt: cannot be read\n");
              output.bytes(0, Output::err, "zeroth: a line\n");
              output.failed();
              output.error(report);
              output.bytes(0, Output::err,
                           "zeroth: error: the job has failed; its ranks:\n  rank 0  pid 6  computing\n  rank 1  pid 7 "
                           " ended\nzeroth: error: rank 1 (pid 7) ended with exit code 2\n");
            }),
            "zeroth: a line\n"
            "zeroth: error: the job has failed; its ranks:\n"
            "  rank 0  pid 6  computing\n"
            "  rank 1  pid 7  ended\n"
            "zeroth: error: rank 1 (pid 7) ended with exit code 2\n"
            "[1] zeroth: error: data.txt: cannot be read\n");
}

TEST(LaunchOutputTest, AnErrorOfTwoRanksIsWrittenOnce) {
  EXPECT_EQ(written([&](Output& output) {
              output.bytes(0, Output::err, "zeroth: error: a key is unknown\n  did you mean it?\n");
              output.bytes(1, Output::err, "zeroth: error: a key is unknown\n  did you mean it?\n");
            }),
            "zeroth: error: a key is unknown\n  did you mean it?\n");
}

}  // namespace
}  // namespace zr::host::cli
