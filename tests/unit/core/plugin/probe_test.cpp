#include "plugin/probe.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "base/error.hpp"

namespace zr::host {

TEST(ProbeProblemTest, IsEmptyForCodeThatReturnsOrThrows) {
  bool here = false;
  EXPECT_EQ(plugin::probe_problem([&] { here = true; }), "");
  EXPECT_FALSE(here) << "the code must not run in this process";
  EXPECT_EQ(plugin::probe_problem([] { throw std::runtime_error("no"); }), "");
}

TEST(ProbeProblemTest, NamesTheSignalAndTheLastLinePrinted) {
  EXPECT_EQ(plugin::probe_problem([] {
              std::fputs("one\ntwo\x1b\n", stderr);
              ::raise(SIGSEGV);
            }),
            "its code crashed with signal 11 (SIGSEGV) while it was being loaded (it printed: two\\x1b); remove it, or "
            "rebuild it for this machine");
}

TEST(ProbeProblemTest, NamesTheExitCode) {
  EXPECT_EQ(plugin::probe_problem([] { ::_exit(0); }),
            "its code ended the process with exit code 0 while it was being loaded; remove it, or rebuild it for this "
            "machine");
}

TEST(ProbeProblemTest, TerminatesCodeThatDoesNotReturn) {
  ::setenv("ZR_PLUGIN_LOAD_SECONDS", "0.2", 1);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(plugin::probe_problem([] {
              for (;;) ::pause();
            }),
            "it did not finish loading within 0.2 seconds; remove it, or set ZR_PLUGIN_LOAD_SECONDS to more seconds");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  ::setenv("ZR_PLUGIN_LOAD_SECONDS", "soon", 1);
  EXPECT_THROW(plugin::probe_problem([] {}), Error);
  ::unsetenv("ZR_PLUGIN_LOAD_SECONDS");
}

TEST(ProbeProblemTest, IsFoundWhenTheProcessIgnoresSigchld) {
  const auto before = ::signal(SIGCHLD, SIG_IGN);
  EXPECT_EQ(plugin::probe_problem([] {}), "");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(plugin::probe_problem([] { ::_exit(3); }),
            "its code ended the process while it was being loaded; remove it, or rebuild it for this machine");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  ::signal(SIGCHLD, before);
}

// The answer may arrive between the check of the pipe and the check of the process.
TEST(ProbeProblemTest, IsEmptyForCodeThatReturnsAtOnce) {
  for (int i = 0; i < 100; ++i) ASSERT_EQ(plugin::probe_problem([] {}), "") << "try " << i;
}

TEST(ProbeProblemTest, LimitsThePrintedOutput) {
  ::setenv("ZR_PLUGIN_LOAD_SECONDS", "0.2", 1);
  const std::string said = plugin::probe_problem([] {
    for (;;) std::fputs("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", stdout);
  });
  ::unsetenv("ZR_PLUGIN_LOAD_SECONDS");
  EXPECT_LT(said.size(), 6000u);
}

}  // namespace zr::host
