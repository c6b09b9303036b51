#include "doctor/check.hpp"

#include <gtest/gtest.h>

#include "base/text.hpp"
#include "support/shell.hpp"

namespace zr::host::doctor {
namespace {

const Report kReport{"0.1.0",
                     "0.9",
                     {{"memory", "available", Verdict::ok, "2.00 GiB of 4.00 GiB"},
                      {"memory", "huge pages", Verdict::warning, "off\x1b[2J", "echo madvise"},
                      {"disk", "a\xff", Verdict::problem, "full"}}};

TEST(DoctorReportTest, PrintsAHeadingPerTopicAndACommandBelowItsCheck) {
  EXPECT_EQ(text_of(kReport),
            "zeroth 0.1.0, plug-in ABI 0.9\n"
            "\nmemory\n"
            "  ok       available: 2.00 GiB of 4.00 GiB\n"
            "  warning  huge pages: off\\x1b[2J\n"
            "           fix: echo madvise\n"
            "\ndisk\n"
            "  problem  a\\xff: full\n"
            "\n1 problem, 1 warning\n");
}

TEST(DoctorReportTest, PrintsNoProblemsAndNoWarnings) {
  EXPECT_EQ(text_of({"0.1.0", "0.9"}), "zeroth 0.1.0, plug-in ABI 0.9\n\nno problems, no warnings\n");
}

TEST(DoctorReportTest, IsValidJsonWithTextThatIsNotUtf8) {
  EXPECT_EQ(json_of({"0.1.0", "0.9", {{"disk", "a\xff", Verdict::problem, "b\n", "c"}}}), R"({
  "zeroth": "0.1.0",
  "abi": "0.9",
  "checks": [
    {
      "topic": "disk",
      "name": "a)"
                                                                                          "\xef\xbf\xbd"
                                                                                          R"(",
      "verdict": "problem",
      "message": "b\n",
      "command": "c"
    }
  ],
  "problems": 1,
  "warnings": 0
}
)");
}

TEST(ShellWordTest, IsReadBackByAShell) {
  for (const char* word : {"/a/plain-path_1.so", "", "two words", "it's", "$HOME `x` \"y\"", "a;b&c|d", "new\nline",
                           "esc\x1b[2J'\\", "umlaut \xc3\xa4", "not utf-8 \xff"}) {
    const auto read = testing::shell("cat <<'OUTER' | bash\nprintf %s " + shell_word(word) + "\nOUTER\n");
    EXPECT_EQ(read.output, word) << shell_word(word);
  }
  EXPECT_EQ(shell_word("/a/plain-path_1.so"), "/a/plain-path_1.so");
  EXPECT_EQ(shell_word("esc\x1b"), "$'esc\\x1b'");
}

}  // namespace
}  // namespace zr::host::doctor
