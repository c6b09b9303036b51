// The reference of the installed headers (.ci/Doxyfile): Doxygen rejects a public name without a comment.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using zr::testing::shell;

// Runs Doxygen with the project's settings; `changes` are settings that replace those.
zr::testing::Outcome doxygen(const zr::test::Scratch& scratch, const std::string& changes = "") {
  return shell("cd '" ZR_SOURCE_DIR "' && { cat .ci/Doxyfile; echo 'OUTPUT_DIRECTORY = " + scratch.folder().string() +
               "'; echo '" + changes + "'; } | doxygen -");
}

class ReferenceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!zr::testing::has_program("doxygen")) GTEST_SKIP() << "needs doxygen (.ci/debian.txt)";
  }
  zr::test::Scratch scratch_;
};

TEST_F(ReferenceTest, EveryPublicNameHasAComment) {
  const auto done = doxygen(scratch_);
  EXPECT_EQ(done.code, 0) << done.output;
  EXPECT_EQ(done.output, "");
  const auto pages = shell("ls '" + scratch_.path("reference") + "'");
  for (const char* page : {"classzr_1_1Engine.html", "classzr_1_1UserError.html", "structzr__strategy__api.html",
                           "optimizer_8hpp.html", "module_8h.html"})
    EXPECT_NE(pages.output.find(page), std::string::npos) << page << " is missing";
}

// Doxygen 1.9.4 reports no enumerators.
TEST_F(ReferenceTest, EveryEnumeratorHasAComment) {
  const auto done = doxygen(scratch_, "GENERATE_XML = YES");
  ASSERT_EQ(done.code, 0) << done.output;
  static const std::regex name("<name>(\\w+)</name>"), tag("<[^>]*>|\\s");
  const std::string begin = "<enumvalue ", end = "</enumvalue>", text_begin = "<briefdescription>";
  int checked = 0;
  for (const auto& entry : std::filesystem::directory_iterator(scratch_.path("xml"))) {
    std::ifstream in(entry.path());
    const std::string xml(std::istreambuf_iterator<char>(in), {});
    for (auto at = xml.find(begin); at != xml.npos; at = xml.find(begin, at + 1), ++checked) {
      const std::string one = xml.substr(at, xml.find(end, at) - at);
      std::smatch match;
      ASSERT_TRUE(std::regex_search(one, match, name)) << one;
      EXPECT_NE(std::regex_replace(one.substr(one.find(text_begin)), tag, ""), "") << match[1] << " has no comment";
    }
  }
  EXPECT_GT(checked, 80);
}

// The filter of .ci/Doxyfile makes Doxygen read the plain comments of the headers, and reports each name without one.
TEST_F(ReferenceTest, NamesTheLineOfAMissingComment) {
  const std::string cpp = scratch_.write("include/zr/planted.hpp",
                                         "// A file.\n"                         // 1
                                         "namespace zr {\n"                     // 2
                                         "struct Bare {\n"                      // 3
                                         "  int first, second;  // for both\n"  // 4
                                         "  int third;\n"                       // 5
                                         "};\n"                                 // 6
                                         "// A function.\n"                     // 7
                                         "int commented(int argument);\n"       // 8
                                         "int uncommented(int argument);\n"     // 9
                                         "/// A class.\n"                       // 10
                                         "class Commented {\n"                  // 11
                                         " public:\n"                           // 12
                                         "  int size() const;  // elements\n"   // 13
                                         "  int capacity() const;\n"            // 14
                                         "  using Element = int;\n"             // 15
                                         "\n"                                   // 16
                                         " private:\n"                          // 17
                                         "  int hidden_;\n"                     // 18
                                         "};\n"                                 // 19
                                         "enum class Uncommented { a, b };\n"   // 20
                                         "}  // namespace zr\n"                 // 21
                                         "#define ZR_UNCOMMENTED 1\n");         // 22
  const std::string c = scratch_.write("include/zr/planted.h",
                                       "/* A file. */\n"                                           // 1
                                       "typedef struct zr_bare {\n"                                // 2
                                       "  uint32_t size, rsv; /* explained by zr/abi/base.h */\n"  // 3
                                       "  int64_t commented; /* elements */\n"                     // 4
                                       "  int64_t uncommented;\n"                                  // 5
                                       "} zr_bare;\n"                                              // 6
                                       "/* A struct. */\n"                                         // 7
                                       "typedef struct zr_commented {\n"                           // 8
                                       "  /* [any] A function. */\n"                               // 9
                                       "  void (*commented)(void *self);\n"                        // 10
                                       "  void (*uncommented)(void *self);\n"                      // 11
                                       "} zr_commented;\n");                                       // 12
  const auto done = doxygen(scratch_, "INPUT = " + scratch_.path("include"));
  EXPECT_NE(done.code, 0);
  std::vector<std::string> found;
  const std::regex error("/(planted\\.\\w+:\\d+): error: (Member|Compound) ([\\w:]+)");
  for (const std::string& line : done.lines())
    if (std::smatch match; std::regex_search(line, match, error))
      found.push_back(match[1].str() + " " + match[3].str());
    else
      ADD_FAILURE() << line;
  EXPECT_THAT(
      found, testing::UnorderedElementsAre("planted.h:2 zr_bare", "planted.h:5 uncommented", "planted.h:11 uncommented",
                                           "planted.hpp:3 zr::Bare", "planted.hpp:5 third", "planted.hpp:9 uncommented",
                                           "planted.hpp:14 capacity", "planted.hpp:15 Element",
                                           "planted.hpp:20 Uncommented", "planted.hpp:22 ZR_UNCOMMENTED"));
}

}  // namespace
