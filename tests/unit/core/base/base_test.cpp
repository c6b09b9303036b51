#include <gtest/gtest.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>

#include "base/error.hpp"
#include "base/huge_page_memory.hpp"
#include "base/ledger.hpp"
#include "base/text.hpp"
#include "base/thread_pool.hpp"
#include "base/trace.hpp"
#include "support/scratch.hpp"

namespace {

using namespace zr::host;
using zr::Error;
using zr::UserError;

TEST(FillErrorTest, WritesCodeTextAndCause) {
  CallError error;
  EXPECT_EQ(fill_error(&error, ZR_IO, "disk full", 28), ZR_IO);
  EXPECT_EQ(error.code, ZR_IO);
  EXPECT_EQ(error.native, 28);
  EXPECT_STREQ(error.msg, "disk full");
  fill_error(&error, ZR_STATE, std::string(10000, 'x'));
  EXPECT_EQ(error.native, 0) << "of the earlier error";
  EXPECT_EQ(std::string(error.msg), std::string(sizeof error.msg - 1, 'x')) << "cut";
  EXPECT_EQ(fill_error(nullptr, ZR_STATE, "nobody reads it"), ZR_STATE);
}

TEST(PluginTextTest, EndsAtTheEndOfTheStructAndEscapesControlCharacters) {
  CallError error;
  std::memset(error.msg, 'x', sizeof error.msg);
  EXPECT_EQ(plugin_text(error), std::string(sizeof error.msg, 'x'));
  std::strcpy(error.msg, "a\033[1m\xe9\nb");
  EXPECT_EQ(plugin_text(error), "a\\x1b[1m\\xe9\nb");
}

TEST(CallPluginTest, ReturnsTheCodeOfTheFunction) {
  CallError error;
  EXPECT_EQ(call_plugin(&error, [] { return zr_code{ZR_OK}; }), ZR_OK);
  EXPECT_EQ(call_plugin(&error, [&] { return fill_error(&error, ZR_IO, "disk full"); }), ZR_IO);
  EXPECT_STREQ(error.msg, "disk full");
}

TEST(CallPluginTest, TurnsAnExceptionIntoAnInternalError) {
  CallError error;
  EXPECT_EQ(call_plugin(&error, []() -> zr_code { throw std::runtime_error("no twiddles"); }), ZR_INTERNAL);
  EXPECT_STREQ(error.msg, "threw an exception across the C ABI: no twiddles; this is a bug in the plug-in");
  EXPECT_EQ(call_plugin(&error, []() -> zr_code { throw 5; }), ZR_INTERNAL);
  EXPECT_STREQ(error.msg, "threw an exception across the C ABI; this is a bug in the plug-in");
  EXPECT_EQ(call_plugin(nullptr, []() -> zr_code { throw 5; }), ZR_INTERNAL);
  EXPECT_NO_THROW(call_plugin_void("optimizer 'x': destroy", [] { throw 5; }));
}

TEST(CallPluginTest, PassesErrorsOfTheHost) {
  EXPECT_THROW(call_plugin(nullptr, []() -> zr_code { fail_user("no"); }), UserError);
}

TEST(NearestTest, FindsAMisspelledWordButNoUnrelatedOne) {
  const std::vector<std::string> words{"train.steps", "train.seed", "train.gradient_clipping", "strategy"};
  EXPECT_EQ(nearest("train.stpes", words), "train.steps");
  EXPECT_EQ(nearest("train.gradient_cliping", words), "train.gradient_clipping");
  EXPECT_EQ(nearest("strateggy", words), "strategy");
  EXPECT_EQ(nearest("zebra", words), "");
}

TEST(ShortestTest, ReadsBackAsTheSameDouble) {
  for (const double value : {0.1, 1.0 / 3, 1e-300, 6.02e23, -0.0, 2.5e-308})
    EXPECT_EQ(std::stod(shortest(value)), value);
  EXPECT_EQ(shortest(0.1), "0.1");
}

// True if this process requested huge pages for the memory at `at`.
bool large_pages_at(const char* at) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    if (std::istringstream range(line); range >> std::hex >> begin >> dash >> end && dash == '-')
      here = begin <= reinterpret_cast<uintptr_t>(at) && reinterpret_cast<uintptr_t>(at) < end;
    if (here && line.rfind("VmFlags:", 0) == 0) return line.find(" hg") != std::string::npos;
  }
  return false;
}

TEST(HugePageMemoryTest, UsesHugePagesForEveryFullHugePage) {
  if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) GTEST_SKIP() << "the kernel has no huge pages";
  const HugePageMemory memory = allocate_huge_pages(3 * kHugePageBytes + 5 * kPageBytes);
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % kHugePageBytes, 0u);
  EXPECT_TRUE(large_pages_at(memory.get()));
  EXPECT_TRUE(large_pages_at(memory.get() + 3 * kHugePageBytes - 1));
  EXPECT_FALSE(large_pages_at(memory.get() + 3 * kHugePageBytes));
}

TEST(HugePageMemoryTest, IsAlignedAsRequestedAndAtLeastToAPage) {
  const HugePageMemory small = allocate_huge_pages(100), wide = allocate_huge_pages(kPageBytes, 16 * kPageBytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small.get()) % kPageBytes, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(wide.get()) % (16 * kPageBytes), 0u);
}

TEST(HugePageMemoryTest, IsNullWhenMemoryIsExhausted) {
  EXPECT_EQ(allocate_huge_pages(int64_t{1} << 60), nullptr);
  std::ifstream overcommit("/proc/sys/vm/overcommit_memory"), memory("/proc/meminfo");
  if (char how = 0; !(overcommit >> how) || how == '1') GTEST_SKIP() << "this machine overcommits without limit";
  int64_t kib = 0;
  for (std::string line; std::getline(memory, line);)
    if (line.rfind("MemTotal:", 0) == 0 || line.rfind("SwapTotal:", 0) == 0) kib += std::stoll(line.substr(10));
  ASSERT_GT(kib, 0);
  EXPECT_EQ(allocate_huge_pages(2 * 1024 * kib), nullptr);
}

TEST(BytesTextTest, HasTheExactNumberBesideAnEqualText) {
  EXPECT_EQ(bytes_text(1 << 20), "1.00 MiB");
  EXPECT_EQ(bytes_text_beside(1 << 20, (1 << 20) + 1), "1.00 MiB (1048576 bytes)");
  EXPECT_EQ(bytes_text_beside(1 << 20, 2 << 20), "1.00 MiB");
}

TEST(ParseBytesTest, ReadsUnits) {
  EXPECT_EQ(parse_bytes("64KiB"), 65536);
  EXPECT_EQ(parse_bytes("1.5 GiB"), 1610612736);
  EXPECT_EQ(parse_bytes("100MB"), 100000000);
  EXPECT_EQ(parse_bytes("4096"), 4096);
  for (const char* wrong : {"", "MiB", "64kib", "-1MiB", "1.5", "nan", "1e400GiB", "64 KiBs"})
    EXPECT_FALSE(parse_bytes(wrong)) << wrong;
}

TEST(ParseDurationTest, ReadsUnits) {
  EXPECT_EQ(parse_duration("250ms"), 0.25);
  EXPECT_EQ(parse_duration("5min"), 300);
  EXPECT_EQ(parse_duration("1.5h"), 5400);
  for (const char* wrong : {"", "5", "5 minutes", "-1s", "infs"}) EXPECT_FALSE(parse_duration(wrong)) << wrong;
}

TEST(MatchesGlobTest, MatchesAnyRunOfCharacters) {
  EXPECT_TRUE(matches_glob("blocks.0.ln1.weight", "*ln*.weight"));
  EXPECT_TRUE(matches_glob("bias", "*bias"));
  EXPECT_TRUE(matches_glob("a", "*"));
  EXPECT_FALSE(matches_glob("weights", "*.weight"));
  EXPECT_FALSE(matches_glob("ln.weight.x", "ln.*t"));
}

TEST(PrintableTest, EscapesControlCharactersAndLineBreaks) {
  EXPECT_EQ(printable("a\nckE/step-00000099: valid\r\tb"), "a\\nckE/step-00000099: valid\\r\\tb");
  EXPECT_EQ(printable("\x1b[2K\x7f\x01"), "\\x1b[2K\\x7f\\x01");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2K"),
            "\\u009b2K")
      << "a control sequence introducer of one character";
  EXPECT_EQ(printable("\u202egnp.exe\u2028"), "\\u202egnp.exe\\u2028");
}

TEST(PrintableTest, KeepsOtherTextAndTheCharactersGiven) {
  EXPECT_EQ(printable("block.0.weight \u00fc \u20ac \U0001f600 '\"\\"),
            "block.0.weight \u00fc \u20ac \U0001f600 '\"\\");
  EXPECT_EQ(printable("one\ntwo\tthree\r", "\n\t"), "one\ntwo\tthree\\r");
}

TEST(PrintableTest, EscapesBytesThatAreNotUtf8) {
  EXPECT_EQ(printable("a\xff\xca.b\xc2"), "a\\xff\\xca.b\\xc2");
  EXPECT_EQ(printable("\xc0\x8a\xed\xa0\x80\xf4\x90\x80\x80"), "\\xc0\\x8a\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80")
      << "overlong, surrogate, beyond Unicode";
}

TEST(LedgerTest, RecordsPlanPeakAndHolders) {
  Ledger ledger;
  ledger.plan(Tier::device, MemoryKind::weights, 100);
  ledger.add(Tier::device, MemoryKind::weights, "weights", 100);
  ledger.add(Tier::device, MemoryKind::optimizer, "m", 50);
  ledger.add(Tier::device, MemoryKind::optimizer, "m", -50);
  ASSERT_EQ(ledger.rows().size(), 2u);
  EXPECT_EQ(ledger.rows()[0].planned, 100);
  EXPECT_EQ(ledger.rows()[1].now, 0);
  EXPECT_EQ(ledger.rows()[1].peak, 50);
  EXPECT_EQ(ledger.peak(Tier::device), 150);
  EXPECT_EQ(ledger.holders(), (std::vector<std::pair<std::string, int64_t>>{{"weights", 100}}));
}

TEST(LedgerTest, AcceptsExternallyMeasuredBytes) {
  Ledger ledger;
  ledger.add(Tier::device, MemoryKind::weights, "weights", 100);
  ledger.observe(Tier::device, MemoryKind::activations, "activations", 20, 70);
  EXPECT_EQ(ledger.held(Tier::device), 120);
  EXPECT_EQ(ledger.peak(Tier::device), 170);
  ledger.observe(Tier::device, MemoryKind::activations, "activations", 5, 60);
  EXPECT_EQ(ledger.held(Tier::device, MemoryKind::activations), 5);
  EXPECT_EQ(ledger.peak(Tier::device), 170) << "a lower peak does not reduce the recorded one";
  ledger.observe(Tier::device, MemoryKind::activations, "activations", 0, 90);
  EXPECT_EQ(ledger.peak(Tier::device), 190);
  EXPECT_EQ(ledger.holders(), (std::vector<std::pair<std::string, int64_t>>{{"weights", 100}}));
}

TEST(LedgerTest, NotifiesTheObserverOfATier) {
  Ledger ledger;
  std::vector<int64_t> reported;
  ledger.on_change(Tier::device, [&](int64_t now) {
    reported.push_back(now);
    if (now > 100) throw UserError("too much");
  });
  ledger.add(Tier::host, MemoryKind::other, "elsewhere", 1000);
  ledger.add(Tier::device, MemoryKind::weights, "weights", 80);
  EXPECT_THROW(ledger.add(Tier::device, MemoryKind::optimizer, "m", 40), Error);
  ledger.on_change(Tier::device, {});
  ledger.add(Tier::device, MemoryKind::optimizer, "m", -40);
  EXPECT_EQ(reported, (std::vector<int64_t>{80, 120}));
}

TEST(ThreadPoolTest, RunsEveryElementOnceOnAnyNumberOfThreads) {
  for (const int width : {1, 2, 5}) {
    ThreadPool pool(width);
    std::vector<std::atomic<int>> seen(1000);
    pool.parallel_for(1000, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
    });
    for (const auto& n : seen) EXPECT_EQ(n, 1);
  }
}

TEST(ThreadPoolTest, CutsTheLargestNumberOfIndices) {
  ThreadPool pool(3);
  std::mutex mutex;
  std::map<int64_t, int64_t> ranges;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  pool.parallel_for(kMost, 1, [&](int64_t begin, int64_t end) {
    const std::lock_guard lock(mutex);
    ranges[begin] = end;
  });
  EXPECT_EQ(ranges, (std::map<int64_t, int64_t>{{0, kMost / 3}, {kMost / 3, kMost / 3 * 2}, {kMost / 3 * 2, kMost}}));
}

TEST(ThreadPoolTest, RethrowsTheFirstException) {
  ThreadPool pool(3);
  EXPECT_THROW(pool.parallel_for(3, 1, [](int64_t, int64_t) { fail_user("no"); }), Error);
}

TEST(FailureTest, CarriesItsExitCode) {
  zr_error error{};
  std::snprintf(error.msg, sizeof error.msg, "beta1 must be below 1");
  try {
    check(ZR_INVALID, error, "optimizer 'x'");
    FAIL();
  } catch (const Error& failure) {
    EXPECT_EQ(failure.exit_code(), 2);
    EXPECT_STREQ(failure.what(), "optimizer 'x': beta1 must be below 1");
  }
  EXPECT_THROW(check(ZR_INTERNAL, error, "x"), Error);
  EXPECT_NO_THROW(check(ZR_OK, error, "x"));
}

}  // namespace
