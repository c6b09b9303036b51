// sdk/abi/0.9 has the headers of ABI 0.9 and their layout as C assertions. They never change again. As long as
// sdk/include is of version 0.9, it declares the same; probe_test.cpp compares it in all later versions.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "support/scratch.hpp"
#include "support/shell.hpp"
#include "support/text_of.hpp"

namespace zr::testing {
namespace {

namespace fs = std::filesystem;
const std::string kPinned = ZR_SOURCE_DIR "/sdk/abi/0.9", kCurrent = ZR_SOURCE_DIR "/sdk/include/zr/abi";

std::set<std::string> headers_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.path().extension() == ".h") names.insert(entry.path().lexically_relative(folder).string());
  return names;
}

// The layout in layout.txt as assertions, without draft headers.
std::string assertions() {
  std::string text =
                  "/* The binary layout of plug-in ABI 0.9, on every LP64 machine. Generated from "
                  "tests/contract/layout.txt; compile it\n"
                  " * with the include path of the headers: cc -std=c11 -fsyntax-only -I include asserts.c */\n",
              body, type;
  std::istringstream layout(text_of(ZR_SOURCE_DIR "/tests/contract/layout.txt"));
  bool draft = false;
  std::smatch match;
  for (std::string line; std::getline(layout, line);) {
    if (std::regex_match(line, match, std::regex("== (.*)"))) {
      draft = match[1].str().find("draft/") == 0;
      if (!draft) text += "#include \"zr/abi/" + match[1].str() + "\"\n";
    } else if (draft) {
      continue;
    } else if (std::regex_match(line, match, std::regex(R"((\w+): (\d+) bytes)"))) {
      type = match[1];
      body += "ZR_STATIC_ASSERT(sizeof(" + type + ") == " + match[2].str() + ", \"" + type + "\");\n";
    } else if (std::regex_match(line, match, std::regex(R"( +(\d+) \+(\d+)  (.*))"))) {
      const std::string offset = match[1], size = match[2], declaration = match[3];
      std::smatch name;
      if (!std::regex_search(declaration, name, std::regex(R"(\(\*(\w+)\))")))
        std::regex_search(declaration, name, std::regex(R"((\w+)(\[\d+\])?$)"));
      const std::string member = name[1];
      body += "MEMBER(" + type + ", " + member + ", " + offset + ", " + size + ");\n";
    } else if (std::regex_match(line, match, std::regex(R"((\w+) = (-?\d+))"))) {
      body += "ZR_STATIC_ASSERT(" + match[1].str() + " == " + match[2].str() + ", \"" + match[1].str() + "\");\n";
    }
  }
  return text +
         "\n#define MEMBER(type, member, offset, size) \\\n"
         "  ZR_STATIC_ASSERT(offsetof(type, member) == offset && sizeof(((type *)0)->member) == size, #type \".\" "
         "#member)\n\n" +
         body;
}

constexpr const char* kRemedy =
    "remedy: what changes the ABI belongs to version 0.10; see CONTRIBUTING.md, \"The plug-in ABI\"";

bool current_version_is_0_9() {
  return text_of(kCurrent + "/base.h").find("#define ZR_ABI_MINOR 9u\n") != std::string::npos;
}

// The lines that the compiler reads.
std::string declarations(const fs::path& header) {
  const Outcome outcome = shell("gcc -w -x c -std=c11 -fpreprocessed -dD -E -P " + header.string());
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  return outcome.output;
}

TEST(PinnedHeadersTest, NeverChange) {
  const Outcome files = shell("cd " + kPinned + " && sha256sum --check --strict --quiet SHA256SUMS");
  EXPECT_EQ(files.code, 0) << files.output << "remedy: git restore sdk/abi";
  const Outcome list = shell("sha256sum < " + kPinned + "/SHA256SUMS");
  EXPECT_EQ(list.lines().at(0), "30bf193490d4483e96355b6c8992fa90f3b83b1bc63d71c0d6e747c652eda6d1  -");
  EXPECT_EQ(headers_in(kPinned + "/zr/abi").size(), 15u);
}

TEST(PinnedHeadersTest, DeclareWhatTheCurrentHeadersDeclare) {
  ASSERT_TRUE(current_version_is_0_9()) << "from 0.10 on, remove this test";
  const fs::path pinned = kPinned + "/zr/abi";
  ASSERT_EQ(headers_in(pinned), headers_in(kCurrent)) << kRemedy;
  for (const std::string& name : headers_in(kCurrent)) {
    const std::string text = declarations(pinned / name);
    EXPECT_NE(text.find("ZR_"), text.npos);
    EXPECT_EQ(text, declarations(fs::path(kCurrent) / name)) << name << "; " << kRemedy;
  }
}

TEST(PinnedHeadersTest, MayHaveOtherCommentsThanTheCurrentHeaders) {
  const test::Scratch scratch;
  const fs::path header = scratch.path("base.h");
  const std::string text = text_of(kCurrent + "/base.h");
  std::ofstream(header) << "/* Another comment. */\n" << text;
  EXPECT_EQ(declarations(header), declarations(kPinned + "/zr/abi/base.h"));
  std::ofstream(header) << text << "typedef int zr_other;\n";
  EXPECT_NE(declarations(header), declarations(kPinned + "/zr/abi/base.h"));
}

TEST(PinnedLayoutTest, MatchesTheLayout) {
  ASSERT_TRUE(current_version_is_0_9()) << "from 0.10 on, remove this test";
  EXPECT_EQ(text_of(kPinned + "/asserts.c"), assertions()) << kRemedy;
}

TEST(PinnedLayoutTest, CoversEveryMember) {
  const std::string text = text_of(kPinned + "/asserts.c");
  EXPECT_NE(text.find("MEMBER(zr_error, msg, 16, 496);"), text.npos);
  EXPECT_NE(text.find("MEMBER(zr_strategy_api, release, 80, 8);"), text.npos);
  EXPECT_NE(text.find("ZR_STATIC_ASSERT(ZR_AGAIN == 11"), text.npos);
  const std::regex assertion("(MEMBER|ZR_STATIC_ASSERT)\\(");
  EXPECT_GT(std::distance(std::sregex_iterator(text.begin(), text.end(), assertion), {}), 300);
}

// x86-64 by both compilers; the other machines by clang, which needs no headers of their systems.
class PinnedLayoutMachineTest : public ::testing::TestWithParam<const char*> {};
TEST_P(PinnedLayoutMachineTest, HasTheSameLayout) {
  const Outcome outcome = shell(std::string(GetParam()) + " -std=c11 -ffreestanding -Wpadded -Werror -fsyntax-only -I" +
                                kPinned + " " + kPinned + "/asserts.c");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
}
INSTANTIATE_TEST_SUITE_P(Machines, PinnedLayoutMachineTest,
                         ::testing::Values("gcc", "clang --target=x86_64-linux-gnu", "clang --target=aarch64-linux-gnu",
                                           "clang --target=riscv64-linux-gnu", "clang --target=powerpc64le-linux-gnu",
                                           "clang --target=s390x-linux-gnu"));

TEST(PinnedLayoutTest, RejectsA32BitMachine) {
  const Outcome outcome = shell("clang --target=i386-linux-gnu -std=c11 -ffreestanding -fsyntax-only -I" + kPinned +
                                " " + kPinned + "/asserts.c");
  EXPECT_NE(outcome.code, 0);
  EXPECT_NE(outcome.output.find("plug-ins are built for 64-bit machines (LP64)"), std::string::npos) << outcome.output;
}

}  // namespace
}  // namespace zr::testing
