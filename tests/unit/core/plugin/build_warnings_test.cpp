// Warnings about libraries that were built with other flags than those of zr_add_plugin().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "plugin/elf.hpp"
#include "plugin/library_loader.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace zr::host::plugin {

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kLion = ZR_SOURCE_DIR "/examples/plugins/lion/lion.cpp";
const std::string kGood = ZR_BUILD_DIR "/tests/plugins/good/zr_optimizer_bad.so";

// Builds a library with plain flags and these; returns its path.
std::string built(const test::Scratch& scratch, const std::string& compiler, const std::string& flags,
                  const std::string& source, const std::string& name = "zr_optimizer_lion.so") {
  const std::string file = scratch.path(name);
  const auto done = testing::shell("umask 022 && " + compiler + " -shared -fPIC -O2 " + flags +
                                   " -I" ZR_SOURCE_DIR "/sdk/include " + source + " -o " + file);
  EXPECT_EQ(done.code, 0) << done.output;
  return file;
}

bool has_fused_multiply_add() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

}  // namespace

TEST(BuildWarningsTest, NameSymbolsBesidesTheEntryAndTheTags) {
  const test::Scratch scratch;
  const std::string source = scratch.write("own.c",
                                           "int acme_first(void) { return 1; } int acme_second = 2;\n"
                                           "__attribute__((visibility(\"hidden\"))) int hidden = 3;\n"
                                           "int zr_tag_own = 4; int zr_module_v1 = 5; extern int other;\n"
                                           "int* acme_third(void) { return &other; }\n");
  EXPECT_EQ(exports_warning(built(scratch, "gcc", "", source)),
            "it exports 3 symbols in addition to zr_module_v1 and its tags (acme_first, acme_second, acme_third); link "
            "it with "
            "-Wl,--version-script=zr.map, as zr_add_plugin() and `pkg-config --libs zeroth-sdk` do");
}

TEST(BuildWarningsTest, CountUniqueSymbolsAndShortenNames) {
  const test::Scratch scratch;
  const std::string name(80, 'n');
  const std::string source = scratch.write("own.cpp",
                                           "inline int& counter() { static int n; return ++n; }\n"
                                           "int " +
                                               name + "() { return counter(); }\n");
  const std::string warning = exports_warning(built(scratch, "g++", "", source));
  EXPECT_THAT(warning, HasSubstr("it exports 2 symbols in addition to zr_module_v1 and its tags (counter()::n, " +
                                 name.substr(0, 60) + "...)"));
  EXPECT_THAT(warning, HasSubstr("; 1 is STB_GNU_UNIQUE, which all libraries of the process share; "));
}

TEST(BuildWarningsTest, AreEmptyForALibraryOfZrAddPlugin) {
  EXPECT_THAT(Registry::validate(kGood).warnings, IsEmpty());
  EXPECT_EQ(exports_warning(ZR_SOURCE_DIR "/CMakeLists.txt"), "");
}

TEST(BuildWarningsTest, NameAPluginOfPlainFlags) {
  const test::Scratch scratch;
  const PluginValidation plain = Registry::validate(built(scratch, "g++", "-std=c++17", kLion));
  ASSERT_TRUE(plain.accepted) << plain.reason;
  EXPECT_THAT(plain.warnings, ElementsAre(HasSubstr("-Wl,--version-script=zr.map")));
}

TEST(BuildWarningsTest, NameAnOptimizerWithFusedMultiplyAdd) {
  if (!has_fused_multiply_add()) GTEST_SKIP() << "this machine has no fused multiply-add with flags of its own";
  const test::Scratch scratch;
  const std::string map = "-march=haswell -Wl,--version-script=" ZR_SOURCE_DIR "/sdk/cmake/zr.map ";
  for (const char* compiler : {"g++", "clang++"}) {
    const std::string fused = built(scratch, compiler, map + "-std=c++17", kLion, std::string(compiler) + "_fused.so"),
                      exact = built(scratch, compiler, map + "-std=c++17 -ffp-contract=off", kLion,
                                    std::string(compiler) + "_exact.so");
    EXPECT_THAT(Registry::validate(fused).warnings, ElementsAre(HasSubstr("compile it with -ffp-contract=off")));
    EXPECT_THAT(Registry::validate(exact).warnings, IsEmpty());
  }
}

TEST(BuildWarningsTest, TestTheFunctionOfTheTag) {
  EXPECT_EQ(multiply_add_warning(nullptr), "");
  EXPECT_EQ(multiply_add_warning([](float a, float b, float c) { return a * b + c; }), "");
  EXPECT_THAT(multiply_add_warning([](float a, float b, float c) { return std::fma(a, b, c); }),
              HasSubstr("fused multiply-add"));
}

TEST(BuildWarningsTest, NameAnOptimizerThatIsCompiledWithFastMath) {
  const test::Scratch scratch;
  const std::string compile =
      "umask 022 && g++ -std=c++17 -fPIC -fvisibility=hidden -ffast-math -ffp-contract=off -c "
      "-I" ZR_SOURCE_DIR "/sdk/include " +
      kLion + " -o " + scratch.path("lion.o");
  ASSERT_EQ(testing::shell(compile).code, 0);
  const std::string file = scratch.path("zr_optimizer_lion.so");  // linked without -ffast-math
  ASSERT_EQ(testing::shell("umask 022 && g++ -shared " + scratch.path("lion.o") + " -o " + file +
                           " -Wl,--version-script=" ZR_SOURCE_DIR "/sdk/cmake/zr.map")
                .code,
            0);
  EXPECT_THAT(build_warnings(load_library(file, read_tags(file))),
              ElementsAre("it is compiled with -ffast-math, so the compiler may change the order of additions, and its "
                          "updates may depend on how parameters are cut; compile it without -ffast-math and -Ofast"));
}

TEST(LibraryLoaderTest, RejectsLibrariesThatFlushDenormalNumbersAndRestoresTheThread) {
  const test::Scratch scratch;
  const std::string fast = built(scratch, "g++", "-std=c++17 -ffast-math -mfpmath=sse", kLion);
  const volatile float smallest = std::numeric_limits<float>::min();
  const PluginValidation validation = load_library(fast, read_tags(fast));
  EXPECT_GT(smallest * 0.5F, 0.F);
  if (validation.accepted) GTEST_SKIP() << "this compiler links no code that flushes denormal numbers with -ffast-math";
  EXPECT_EQ(validation.reason,
            "loading it changes how this process computes: numbers below 2^-126 become 0; compile and link it without "
            "-ffast-math, -Ofast and -funsafe-math-optimizations");
  EXPECT_EQ(validation.rejection.cause, RejectionCause::plugin_bug);
}

}  // namespace zr::host::plugin
