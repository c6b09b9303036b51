// Every header of sdk/ compiles alone, in every language standard that a plug-in author may use.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "support/shell.hpp"

namespace zr::testing {
namespace {

const std::string kInclude = ZR_SOURCE_DIR "/sdk/include";

std::set<std::string> headers_in(const std::string& folder, const std::string& extension) {
  std::set<std::string> headers;
  for (const auto& entry : std::filesystem::directory_iterator(kInclude + "/" + folder)) {
    if (entry.path().extension() == extension) headers.insert(folder + "/" + entry.path().filename().string());
  }
  return headers;
}

void expect_compiles(const std::string& compiler, const std::string& dialect, const std::string& header,
                     const std::string& flags) {
  ASSERT_TRUE(has_program(compiler)) << compiler << " is not installed; `make setup` installs it (.ci/debian.txt)";
  const std::string language = dialect[0] == 'c' && dialect[1] == '+' ? "c++" : "c";
  const Outcome outcome =
      shell("printf '#include \"" + header + "\"\\n' | " + compiler + " -std=" + dialect +
            " -Wall -Wextra -Wpedantic -Werror " + flags + " -fsyntax-only -I" + kInclude + " -x " + language + " -");
  EXPECT_EQ(outcome.code, 0) << compiler << " -std=" << dialect << " " << header << "\n" << outcome.output;
}

class AbiHeadersTest : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(AbiHeadersTest, CompileAloneWithoutImplicitPadding) {
  const auto [compiler, dialect] = GetParam();
  const auto headers = headers_in("zr/abi", ".h");
  ASSERT_GE(headers.size(), 7u);
  for (const auto& header : headers) expect_compiles(compiler, dialect, header, "-Wpadded");
}
INSTANTIATE_TEST_SUITE_P(Dialects, AbiHeadersTest,
                         ::testing::Values(std::pair{"gcc", "c11"}, std::pair{"gcc", "c17"}, std::pair{"g++", "c++17"},
                                           std::pair{"g++", "c++20"}, std::pair{"clang", "c11"},
                                           std::pair{"clang", "c17"}, std::pair{"clang++", "c++17"},
                                           std::pair{"clang++", "c++20"}),
                         [](const auto& info) {
                           std::string name = std::string(info.param.first) + "_" + info.param.second;
                           for (char& c : name) c = c == '+' ? 'x' : c;
                           return name;
                         });

class LayerHeadersTest : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(LayerHeadersTest, CompileAlone) {
  const auto [compiler, dialect] = GetParam();
  const auto headers = headers_in("zr", ".hpp");
  ASSERT_GE(headers.size(), 5u);
  for (const auto& header : headers) expect_compiles(compiler, dialect, header, "");
}
INSTANTIATE_TEST_SUITE_P(Dialects, LayerHeadersTest,
                         ::testing::Values(std::pair{"g++", "c++17"}, std::pair{"g++", "c++20"},
                                           std::pair{"clang++", "c++17"}, std::pair{"clang++", "c++20"}),
                         [](const auto& info) {
                           std::string name = std::string(info.param.first) + "_" + info.param.second;
                           for (char& c : name) c = c == '+' ? 'x' : c;
                           return name;
                         });

}  // namespace
}  // namespace zr::testing
