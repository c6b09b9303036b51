#include "base/trace.hpp"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/directory.hpp"
#include "support/scratch.hpp"

namespace {

using namespace zr::host;
using namespace std::chrono_literals;
using Json = nlohmann::json;

class TraceTest : public ::testing::Test {
 protected:
  // The events of rank 3's file, after `record` has recorded spans before and after the file was opened.
  template <class Record>
  Json events(Record&& record) {
    Directory directory = Directory::open(scratch_.path("run"), true);
    {
      Trace trace(3);
      record(trace, [&] { trace.open(directory.create("trace-3.json")); });
    }
    std::ifstream in(scratch_.path("run/trace-3.json"));
    return Json::parse(in);
  }
  static Trace::Time at(std::chrono::nanoseconds time) { return Trace::Time(time); }
  zr::test::Scratch scratch_;
};

TEST_F(TraceTest, WritesSpansInMicrosecondsOnATrackEach) {
  const Json all = events([&](Trace& trace, const auto& open) {
    trace.span("compute", "forward", at(1500ns), at(4000ns));
    open();
    trace.span("nvme", "read", at(2ms), at(5ms));
    trace.span("compute", "backward", at(4000ns), at(4001ns));
  });
  EXPECT_EQ(all, Json::parse(R"([
    {"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "rank 3"}},
    {"ph": "M", "name": "thread_name", "pid": 3, "tid": 1, "args": {"name": "compute"}},
    {"ph": "X", "name": "forward", "pid": 3, "tid": 1, "ts": 1.5, "dur": 2.5},
    {"ph": "M", "name": "thread_name", "pid": 3, "tid": 2, "args": {"name": "nvme"}},
    {"ph": "X", "name": "read", "pid": 3, "tid": 2, "ts": 2000.0, "dur": 3000.0},
    {"ph": "X", "name": "backward", "pid": 3, "tid": 1, "ts": 4.0, "dur": 0.001}])"));
}

TEST_F(TraceTest, WritesAnyNameAsValidJson) {
  const Json all = events([&](Trace& trace, const auto& open) {
    open();
    trace.span("a \"track\"", "line\nand \\ and \xff", at(0ns), at(1us));
  });
  EXPECT_EQ(all.at(1).at("args").at("name"), "a \"track\"");
  EXPECT_EQ(all.at(2).at("name"), "line\nand \\ and \xef\xbf\xbd");  // U+FFFD in place of the invalid byte
}

TEST_F(TraceTest, HoldsNoMemoryAfterAFailedWrite) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{100'000, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  {
    Trace trace(0);
    trace.open(File(scratch_.path("trace.json"), File::Mode::create));
    const auto draw = [&](int spans) {
      for (int i = 0; i < spans; ++i) trace.span("training", std::string(100, 'x'), {}, {});
    };
    draw(2000);  // more than the file size limit
    const auto held = [] { return ::mallinfo2().uordblks + ::mallinfo2().hblkhd; };
    const std::size_t before_more = held();
    draw(100'000);
    EXPECT_LT(held(), before_more + 100'000);
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_LE(std::filesystem::file_size(scratch_.path("trace.json")), 100'000u);
}

}  // namespace
