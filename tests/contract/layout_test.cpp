// The binary layout of the ABI: layout.txt contains every struct's size, every member's offset, size and type, and
// every constant. A change of this file is a change of the ABI. `ZR_UPDATE_GOLDEN=1` updates the file.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>

#include "support/golden_cases.hpp"
#include "support/shell.hpp"
#include "support/text_of.hpp"

namespace zr::testing {
namespace {

const std::string kGolden = ZR_SOURCE_DIR "/tests/contract/layout.txt";
const std::string kAbi = ZR_SOURCE_DIR "/sdk/include/zr/abi";

std::string squeezed(const std::string& text) {
  const std::string one = std::regex_replace(text, std::regex("\\s+"), " ");
  return std::regex_replace(one, std::regex("^ | $"), "");
}
// std::regex would recurse once per character of a comment.
std::string without_comments(const std::string& text) {
  std::string kept;
  std::size_t from = 0;
  for (auto begin = text.find("/*"); begin != text.npos; begin = text.find("/*", from)) {
    kept += text.substr(from, begin - from);
    from = text.find("*/", begin) + 2;
  }
  return kept + text.substr(from);
}
std::string quoted(const std::string& text) { return std::regex_replace(text, std::regex("%"), "%%"); }

/// Splits at `mark` outside of parentheses.
std::vector<std::string> split(const std::string& text, char mark) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : text) {
    depth += c == '(' ? 1 : c == ')' ? -1 : 0;
    if (c == mark && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

/// Name and declaration of each member of a declaration list: "uint32_t size, flags" is two.
std::vector<std::pair<std::string, std::string>> members(const std::string& declaration) {
  std::smatch match;
  if (std::regex_search(declaration, match, std::regex(R"(\(\*(\w+)\))"))) return {{match[1], declaration}};
  const std::vector<std::string> declarators = split(declaration, ',');
  std::vector<std::pair<std::string, std::string>> all;
  std::regex_match(declarators[0], match, std::regex(R"((.*?)(\**\w+(\[\d+\])?))"));
  const std::string type = match[1];
  for (std::size_t i = 0; i < declarators.size(); ++i) {
    const std::string declarator = i == 0 ? match[2].str() : squeezed(declarators[i]);
    std::smatch name;
    std::regex_search(declarator, name, std::regex(R"((\w+)(\[\d+\])?$)"));
    all.emplace_back(name[1], type + declarator);
  }
  return all;
}

/// A C program that prints the layout of every header.
std::string probe() {
  std::set<std::string> headers;  // "base.h", "draft/draft.h"
  for (const auto& entry : std::filesystem::recursive_directory_iterator(kAbi)) {
    if (entry.path().extension() == ".h") headers.insert(entry.path().lexically_relative(kAbi).string());
  }
  std::string includes = "#include <stdio.h>\n", body = "printf(\"ABI %u.%u\\n\", ZR_ABI_MAJOR, ZR_ABI_MINOR);\n";
  for (const std::string& header : headers) {
    includes += "#include \"zr/abi/" + header + "\"\n";
    body += "puts(\"== " + header + "\");\n";
    const std::string text = without_comments(text_of(kAbi + "/" + header));
    const std::regex structure(R"(typedef struct \w+ \{([^}]*)\} (\w+);)"), enumeration(R"(enum \{([^}]*)\};)"),
        alias(R"(typedef (u?int\d+_t \w+|\w+ \(\*\w+\)[^;]*|struct \w+ \*?\w+);)");
    for (std::sregex_iterator it(text.begin(), text.end(), alias), end; it != end; ++it) {
      body += "puts(\"type " + squeezed((*it)[1]) + "\");\n";
    }
    for (std::sregex_iterator it(text.begin(), text.end(), enumeration), end; it != end; ++it) {
      for (const std::string& part : split((*it)[1], ',')) {
        const std::string name = squeezed(part.substr(0, part.find('=')));
        if (!name.empty()) body += "printf(\"" + name + " = %lld\\n\", (long long)" + name + ");\n";
      }
    }
    for (std::sregex_iterator it(text.begin(), text.end(), structure), end; it != end; ++it) {
      const std::string name = (*it)[2];
      body += "printf(\"" + name + ": %zu bytes\\n\", sizeof(" + name + "));\n";
      for (const std::string& declaration : split((*it)[1], ';')) {
        if (squeezed(declaration).empty()) continue;
        for (const auto& [member, as_declared] : members(squeezed(declaration))) {
          body += "printf(\"  %3zu +%zu  " + quoted(as_declared) + "\\n\", offsetof(" + name + ", " + member +
                  "), sizeof(((" + name + "*)0)->" + member + "));\n";
        }
      }
    }
  }
  return includes + "int main(void) {\n" + body + "return 0; }\n";
}

std::string layout_by(const std::string& compiler) {
  std::string folder = (std::filesystem::temp_directory_path() / "zr_layout_XXXXXX").string();
  if (!mkdtemp(folder.data())) throw std::runtime_error("cannot create a temporary folder");
  std::ofstream(folder + "/probe.c") << probe();
  const Outcome built =
      shell(compiler + " -std=c11 -I" ZR_SOURCE_DIR "/sdk/include " + folder + "/probe.c -o " + folder + "/probe");
  EXPECT_EQ(built.code, 0) << built.output;
  const std::string layout = shell(folder + "/probe").output;
  std::filesystem::remove_all(folder);
  return layout;
}

TEST(LayoutTest, MatchesTheGoldenFile) {
  SCOPED_TRACE("a difference is an ABI change: if it is intended, also add a line to sdk/CHANGELOG.md");
  golden::check_text(kGolden, layout_by("gcc"));
}

TEST(LayoutTest, IsTheSameWithClang) {
  ASSERT_TRUE(has_program("clang")) << "clang is not installed; `make setup` installs it (.ci/debian.txt)";
  EXPECT_EQ(layout_by("clang"), text_of(kGolden));
}

TEST(LayoutTest, CoversDraftHeadersAndFrozenSizes) {
  const std::string layout = layout_by("gcc");
  for (const char* line :
       {"\n== draft/draft.h\n", "\n== draft/optimizer_shapes.h\n", "\nZR_ROWWISE = 2\n",
        "\nzr_local_gradients_api: 56 bytes\n", "\nzr_error: 512 bytes\n", "\nzr_use_size_0_9 = 32\n"})
    EXPECT_NE(layout.find(line), layout.npos) << line;
}

// Structs only grow, and in version 0.9 itself they have exactly these sizes.
TEST(LayoutTest, FrozenSizesAreThoseOfVersion09) {
  const std::string layout = layout_by("gcc");
  const bool is_first = layout.rfind("ABI 0.9\n", 0) == 0;
  const std::regex frozen(R"(\n(\w+)_size_0_9 = (\d+))");
  int count = 0;
  for (std::sregex_iterator it(layout.begin(), layout.end(), frozen), end; it != end; ++it, ++count) {
    const std::string type = (*it)[1];
    std::smatch now;
    ASSERT_TRUE(std::regex_search(layout, now, std::regex("\n" + type + ": (\\d+) bytes"))) << type;
    const long size = std::stol((*it)[2]), size_now = std::stol(now[1]);
    EXPECT_LE(size, size_now) << type;
    if (is_first) {
      EXPECT_EQ(size, size_now) << type;
    }
  }
  EXPECT_GE(count, 30);
}

TEST(LayoutTest, CountsEveryMemberOfAStruct) {
  const auto both = members("const char *name, *vendor");
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0].second, "const char *name");
  EXPECT_EQ(both[1].first, "vendor");
  EXPECT_EQ(both[1].second, "const char *vendor");
  EXPECT_EQ(members("void (*free)(const zr_host *, const zr_view *)")[0].first, "free");
  EXPECT_EQ(members("char msg[496]")[0].first, "msg");
}

}  // namespace
}  // namespace zr::testing
