// Every header of sdk/ compiles alone, in every language standard that a plug-in author may use, and without warnings.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "support/scratch.hpp"
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

struct Dialect {
  const char *compiler, *standard;
};
void expect_compiles(const Dialect& dialect, const std::string& source, const std::string& flags) {
  const std::string compiler = dialect.compiler, standard = dialect.standard;
  ASSERT_TRUE(has_program(compiler)) << compiler << " is not installed; `make setup` installs it (.ci/debian.txt)";
  const std::string language = standard.rfind("c++", 0) == 0 ? "c++" : "c";
  const Outcome outcome = shell("printf '" + source + "\\n' | " + compiler + " -std=" + standard +
                                " -Wall -Wextra -Wpedantic -Wshadow -Werror " + flags + " -fsyntax-only -I" + kInclude +
                                " -x " + language + " -");
  EXPECT_EQ(outcome.code, 0) << compiler << " -std=" << standard << " " << source << "\n" << outcome.output;
}
std::string include(const std::string& header) { return "#include \"" + header + "\""; }

std::string name_of(const ::testing::TestParamInfo<Dialect>& info) {
  std::string name = std::string(info.param.compiler) + "_" + info.param.standard;
  for (char& c : name) c = c == '+' ? 'x' : c;
  return name;
}

class AbiHeadersTest : public ::testing::TestWithParam<Dialect> {};
const std::string kAbiFlags = "-Wpadded -Wconversion";

TEST_P(AbiHeadersTest, CompileAloneWithoutImplicitPadding) {
  const auto headers = headers_in("zr/abi", ".h"), drafts = headers_in("zr/abi/draft", ".h");
  ASSERT_GE(headers.size(), 7u);
  ASSERT_GE(drafts.size(), 2u);
  for (const auto& header : headers) expect_compiles(GetParam(), include(header), kAbiFlags);
  for (const auto& header : drafts) expect_compiles(GetParam(), include(header), kAbiFlags);
}

TEST_P(AbiHeadersTest, DefineTagsThatCompile) {
  expect_compiles(GetParam(),
                  include("zr/abi/module.h") + "\\n" + include("zr/abi/draft/draft.h") +
                      "\\nZR_TAG(ZR_ABI_TAG);\\nZR_TAG(kind_optimizer_1);\\nZR_ID_TAG(optimizer, \"lion\");\\n"
                      "ZR_ID_TAG(optimizer, \"acme.lion\");",
                  kAbiFlags);
}

TEST_P(AbiHeadersTest, DefineAModuleInC) {
  expect_compiles(GetParam(),
                  include("zr/c.h") +
                      "\\nstatic const zr_component component = {sizeof(zr_component), 0, \"acme.lion\", "
                      "\"zr.optimizer/1\", \"1.0\", NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL};\\n"
                      "ZR_MODULE_C(optimizer, \"acme.lion\", \"acme\", \"1.0\", component);",
                  "-Wconversion");
}

// c++2b is C++23: clang 14 has no other name for it.
INSTANTIATE_TEST_SUITE_P(Dialects, AbiHeadersTest,
                         ::testing::Values(Dialect{"gcc", "c11"}, Dialect{"gcc", "c17"}, Dialect{"g++", "c++17"},
                                           Dialect{"g++", "c++20"}, Dialect{"g++", "c++2b"}, Dialect{"clang", "c11"},
                                           Dialect{"clang", "c17"}, Dialect{"clang++", "c++17"},
                                           Dialect{"clang++", "c++20"}, Dialect{"clang++", "c++2b"}),
                         name_of);

class LayerHeadersTest : public ::testing::TestWithParam<Dialect> {};

TEST_P(LayerHeadersTest, CompileAlone) {
  const auto headers = headers_in("zr", ".hpp");
  ASSERT_GE(headers.size(), 5u);
  for (const auto& header : headers) expect_compiles(GetParam(), include(header), "");
}
INSTANTIATE_TEST_SUITE_P(Dialects, LayerHeadersTest, ::testing::Values(Dialect{"g++", "c++17"}), name_of);
INSTANTIATE_TEST_SUITE_P(SLOW_Dialects, LayerHeadersTest,
                         ::testing::Values(Dialect{"g++", "c++2b"}, Dialect{"clang++", "c++17"},
                                           Dialect{"clang++", "c++2b"}),
                         name_of);

// An optimizer whose optional members are `members`.
Outcome compile_optimizer(const std::string& compiler, const std::string& members) {
  const test::Scratch scratch;
  const std::string file = (scratch.folder() / "optimizer.cpp").string();
  std::ofstream(file) << "#include \"zr/optimizer.hpp\"\n"
                         "class Mine : public zr::Optimizer<Mine> {\n"
                      << members
                      << " public:\n"
                         "  void update(const zr::Update& u) const { u.weight[0] = 0; }\n"
                         "};\n"
                         "ZR_OPTIMIZER(Mine, \"mine\", \"example\", \"1.0\");\n";
  return shell(compiler +
               " -std=c++17 -fvisibility=hidden -Wall -Wextra -Werror -fsyntax-only -I" ZR_SOURCE_DIR "/sdk/include " +
               file);
}

TEST_P(LayerHeadersTest, RejectOptionalMembersThatTheyCannotUse) {
  const std::string compiler = GetParam().compiler, slots = "static constexpr zr_slot slots[] = {zr::slot(\"v\")};\n";
  const auto message = [](const std::string& member) {
    return "the member '" + member +
           "' is private, overloaded or a type; make it public, with one meaning, or rename it";
  };
  EXPECT_EQ(compile_optimizer(compiler, " public:\n" + slots).output, "");
  EXPECT_EQ(compile_optimizer(compiler, "").output, "");
  const Outcome hidden = compile_optimizer(compiler, slots);
  EXPECT_NE(hidden.code, 0);
  EXPECT_NE(hidden.output.find(message("slots")), std::string::npos) << hidden.output;
  const Outcome overloaded = compile_optimizer(
      compiler, " public:\n" + slots + "uint32_t n_slots() const { return 1; }\nuint32_t n_slots(int) { return 1; }\n");
  EXPECT_NE(overloaded.code, 0);
  EXPECT_NE(overloaded.output.find(message("n_slots")), std::string::npos) << overloaded.output;
}

}  // namespace
}  // namespace zr::testing
