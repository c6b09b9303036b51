// Tests each rule of arch_test.cpp: a temporary tree contains violations that the rule must find, and similar code
// that it must not report.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "arch/declarations.hpp"
#include "arch/rules.hpp"
#include "support/scratch.hpp"

namespace zr::arch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ArchitectureRulesTest : public ::testing::Test {
 protected:
  void plant(const std::string& file, const std::string& text) { tree_.write(file, text); }
  Found found(Found (*rule)(const fs::path&)) const { return rule(tree_.folder()); }
  const test::Scratch tree_;
};

TEST_F(ArchitectureRulesTest, FindsAPluginNameInCore) {
  plant("plugins/zero1/CMakeLists.txt", "zr_add_plugin(zr_zero1 ROLE strategy ID zero1 SOURCES zero1.cpp)\n");
  plant("plugins/comm_shm/CMakeLists.txt", "zr_add_plugin(zr_comm_shm ROLE communicator ID shm SOURCES shm.cpp)\n");
  plant("plugins/optimizers/adamw/CMakeLists.txt", "");
  plant("core/engine/a.cpp", "if (id == \"shm\") {}\nint shmget;  // /dev/shm_1\nopen(\"/dev/shm\");\n");
  plant("core/engine/b.cpp", "class AdamW;\nauto x = kZero10;\n");
  plant("core/plan/CMakeLists.txt", "add_dependencies(zr_plan zr_zero1)\n");
  EXPECT_THAT(found(plugin_names_in_core),
              ElementsAre("core/engine/a.cpp:1: if (id == \"shm\") {}",
                          "core/engine/a.cpp:2: int shmget;  // /dev/shm_1", "core/engine/b.cpp:1: class AdamW;",
                          "core/plan/CMakeLists.txt:1: add_dependencies(zr_plan zr_zero1)"));
}

TEST_F(ArchitectureRulesTest, FindsThePluginIdCpuOnlyInQuotes) {
  plant("plugins/offload_cpu/CMakeLists.txt", "zr_add_plugin(zr_offload_cpu ROLE offload ID cpu SOURCES cpu.cpp)\n");
  plant("core/engine/a.cpp", "cpu_set_t set;  // of this CPU's cores\nif (id == \"cpu\") {}\nlink(zr_offload_cpu);\n");
  EXPECT_THAT(found(plugin_names_in_core),
              ElementsAre("core/engine/a.cpp:2: if (id == \"cpu\") {}", "core/engine/a.cpp:3: link(zr_offload_cpu);"));
}

TEST_F(ArchitectureRulesTest, FindsATestOfTheZeroStageInCore) {
  plant("core/engine/step.cpp",
        "if (stage == 2) gather();\n"
        "if (a && config.stage > 1) gather();\n"
        "switch (stage) {\n"
        "while (this->stage_ != 3) gather();\n"
        "const bool whole = zero_stage < 3;\n"
        "return plan->stage;\n"
        "int zeroStage = 2;\n"
        "if (staged(operation)) stage(operation);  // another word\n");
  EXPECT_EQ(found(stages_in_core).size(), 7u);
  plant("core/engine/step.cpp", "if (staging_bytes > capacity) through_staging();\n");
  EXPECT_THAT(found(stages_in_core), IsEmpty());
}

TEST_F(ArchitectureRulesTest, FindsProcessExitInLibrary) {
  plant("core/api/program.cpp", "std::exit(2);\n  _exit(4);\nstd::abort();\nif (x) std::_Exit(1);\n");
  plant("core/api/include/zr/program.hpp", "[](int code) { std::_Exit(code); }\n");
  plant("core/cli/main.cpp", "std::exit(2);\n");
  EXPECT_EQ(found(process_exits).size(), 4u);
  plant("core/api/program.cpp", "error.exit(2);\nrequest_exit();\ncomm->abort();\nbool on_exit(int);\n");
  EXPECT_THAT(found(process_exits), IsEmpty());
}

TEST_F(ArchitectureRulesTest, FindsAStaticObjectThatIsDestroyed) {
  plant("core/engine/a.cpp",
        "  static std::map<int, int> all;\n"
        "  static const std::string text = read();\n"
        "  thread_local std::vector<int> seen;\n"
        "    static Registry registry;\n");
  plant("plugins/zero1/b.cpp", "  static std::vector<int> all{1, 2};\n");
  EXPECT_EQ(found(destroyed_statics).size(), 5u);
  plant("core/engine/a.cpp",
        "  static auto* all = new std::map<int, int>;\n"
        "  static const auto& text = *new std::string(read());\n"
        "  static std::atomic<std::thread::id> thread{};\n"
        "  static const bool once = (install(), true);\n"
        "  static constexpr std::array<int, 2> kTwo{1, 2};\n"
        "  static int64_t ms_since(Time then);\n"
        "  static std::map<int, int> make() { return {}; }\n"
        "  thread_local Cache* cache = nullptr;\n"
        "  thread_local const Owner owner;  // destroyed: at the end of the thread\n"
        "  static Mutex mutex;\n");
  plant("plugins/zero1/b.cpp", "std::vector<int> all{1, 2};\n");
  EXPECT_THAT(found(destroyed_statics), IsEmpty());
}

TEST_F(ArchitectureRulesTest, FindsLibtorchOutsideItsSubsystems) {
  plant("core/model/torch_model.cpp", "#include <torch/torch.h>\n");
  plant("core/model/CMakeLists.txt", "zr_find_torch()\nzr_subsystem(model LIBRARIES zr::torch)\n");
  plant("core/engine/step.cpp",
        "#include <ATen/ATen.h>\n#include \"caffe2/core/common.h\"\n#include \"model/model.hpp\"\n");
  plant("core/engine/CMakeLists.txt", "zr_subsystem(engine LIBRARIES zr::torch)\ntarget_link_libraries(e torch_cpu)\n");
  plant("plugins/zero1/zero1.cpp", "#include <c10/util/Half.h>\n");
  plant("sdk/cmake/ZrTorch.cmake", "add_library(zr::torch ALIAS zr_torch_lib)\n");
  EXPECT_EQ(found(libtorch_outside_its_subsystems).size(), 5u);
}

TEST_F(ArchitectureRulesTest, FindsACoreHeaderInAPlugin) {
  plant("plugins/zero1/zero1.cpp",
        "#include \"plan/plan.hpp\"\n#include \"core/base/log.hpp\"\n#include \"zr/base.hpp\"\n");
  EXPECT_EQ(found(host_headers_in_plugins).size(), 2u);
}

TEST_F(ArchitectureRulesTest, FindsMoreThanTheSdkInConform) {
  plant(
      "sdk/conform/rule.cpp",
      "#include \"conform/rule.hpp\"\n#include \"zr/host.hpp\"\n#include <nlohmann/json.hpp>\n#include <fmt/format.h>\n"
      "#include \"base/error.hpp\"\n");
  EXPECT_THAT(found(more_than_the_sdk_in_conform), ElementsAre("sdk/conform/rule.cpp:4: #include <fmt/format.h>",
                                                               "sdk/conform/rule.cpp:5: #include \"base/error.hpp\""));
}

TEST_F(ArchitectureRulesTest, FindsConformanceInCore) {
  plant("core/cli/conform_command.cpp", "#include \"conform/conform.hpp\"\n");
  plant("core/job/simulated_step.cpp", "#include \"conform/strategy_step.hpp\"\n#include \"conform/world.hpp\"\n");
  plant("core/engine/session.cpp", "#include \"conform/strategy_step.hpp\"\n");
  EXPECT_THAT(found(conform_in_core), ElementsAre("core/engine/session.cpp: conform/strategy_step.hpp",
                                                  "core/job/simulated_step.cpp: conform/world.hpp"));
}

TEST_F(ArchitectureRulesTest, FindsAConfigurationReadByPath) {
  const std::string include = "#include \"config/key_reader.hpp\"\n";
  plant("core/config/check.cpp", include);
  plant("core/api/program.cpp", include + "return KeyReader(config).text(path);\n");
  plant("core/engine/a.cpp", include + "const int64_t steps = config.train().steps;\n");
  plant("core/cli/b.cpp",
        "const int64_t steps = host::KeyReader(config).integer(\"train.steps\");\n"
        "for (const Entry& entry : config.entries()) if (entry.key.path() == \"train.steps\") found(entry);\n"
        "for (const Entry* entry : config.table(\"train\")) found(*entry);\n"
        "for (const Entry* entry : config.table(\"strategy.\" + id)) found(*entry);\n");
  EXPECT_THAT(found(configuration_read_by_path),
              ElementsAre("core/cli/b.cpp:1: const int64_t steps = host::KeyReader(config).integer(\"train.steps\");",
                          "core/cli/b.cpp:2: for (const Entry& entry : config.entries()) if (entry.key.path() == "
                          "\"train.steps\") found(entry);",
                          "core/cli/b.cpp:3: for (const Entry* entry : config.table(\"train\")) found(*entry);",
                          "core/engine/a.cpp:1: #include \"config/key_reader.hpp\""));
}

TEST_F(ArchitectureRulesTest, FindsAModelThatUsesZeroth) {
  plant("examples/gpt/model.hpp",
        "#include \"zr/engine.hpp\"\n// zero-mean\nzr::Engine* engine;  // Zeroth\nint hzr;\n");
  plant("examples/gpt/gpt.cpp", "#include \"zr/engine.hpp\"\n");
  EXPECT_EQ(found(zeroth_in_models).size(), 2u);
}

TEST_F(ArchitectureRulesTest, FindsAVendorOfDevicesInCore) {
  plant("core/engine/stream.cpp", "// as a cudaStream_t\nvoid wait() { cudaStreamSynchronize(nullptr); }\nint ship;\n");
  plant("core/doctor/gpu.cpp", "int nvidia;\n");
  EXPECT_EQ(found(vendors_in_core).size(), 1u);
}

TEST_F(ArchitectureRulesTest, FindsALongFile) {
  std::string text;
  for (int i = 0; i < 600; ++i) text += "//\n";
  plant("core/base/long.cpp", text);
  EXPECT_THAT(found(long_files), IsEmpty());
  plant("core/base/long.cpp", text + "//\n");
  EXPECT_THAT(found(long_files), ElementsAre("core/base/long.cpp: 601 lines"));
}

TEST_F(ArchitectureRulesTest, FindsAWideLine) {
  std::string line;
  while (line.size() < 117) line += "###";
  plant("core/base/CMakeLists.txt", line + "###\n");
  plant("core/base/wide.cpp", line + "##é\n");  // a letter of two bytes
  EXPECT_THAT(found(wide_lines), IsEmpty());
  plant("core/base/CMakeLists.txt", line + "####\n");
  EXPECT_THAT(found(wide_lines), ElementsAre("core/base/CMakeLists.txt:1: 121 columns"));
}

TEST_F(ArchitectureRulesTest, FindsASubsystemAndAPluginWithoutAReadme) {
  plant("core/base/CMakeLists.txt", "");
  plant("core/base/README.md", "");
  plant("core/comm/CMakeLists.txt", "");
  plant("plugins/optimizers/lion/CMakeLists.txt", "");
  EXPECT_THAT(found(missing_readmes), ElementsAre("plugins/optimizers/lion: no README.md", "core/comm: no README.md"));
}

TEST_F(ArchitectureRulesTest, FindsAnUndocumentedFunction) {
  plant("core/api/include/zr/engine.hpp", "class Engine {\n public:\n\n  int rank() const;\n};\n");
  plant("sdk/include/zr/base.hpp", "inline int one() { return 1; }\n");
  plant("core/base/text.hpp", "inline int one() { return 1; }\nint two(int n);\n");
  EXPECT_THAT(found(undocumented_functions),
              ElementsAre("core/api/include/zr/engine.hpp:4: int rank() const", "core/base/text.hpp:2: int two(int n)",
                          "sdk/include/zr/base.hpp:1: inline int one()"));
}

TEST_F(ArchitectureRulesTest, FindsAFunctionPointerWithoutThreadTag) {
  plant("sdk/include/zr/abi/tier.h",
        "typedef struct zr_tier {\n"
        "  uint32_t size;\n"
        "  int (*open)(void *self); /* [control] */\n"
        "  /* [step] both\n"
        "   * ways */\n"
        "  int (*write)(void *self,\n"
        "               int n);\n"
        "  int (*read)(void *self, int n);\n"
        "  void (*close)(void *self); /* [sometimes] */\n"
        "  /* [use] fn must not throw */\n"
        "  void (*each)(void *self, void (*fn)(void *ctx), void *ctx);\n"
        "  /* [use] fn [worker] must not throw */\n"
        "  void (*all)(void *self, void (*fn)(void *ctx), void *ctx);\n"
        "} zr_tier;\n"
        "typedef void (*zr_sink)(void *ctx);\n");
  EXPECT_THAT(
      found(untagged_slots),
      ElementsAre("sdk/include/zr/abi/tier.h:8: read in int (*read)(void *self, int n);",
                  "sdk/include/zr/abi/tier.h:9: close in void (*close)(void *self);",
                  "sdk/include/zr/abi/tier.h:11: fn in void (*each)(void *self, void (*fn)(void *ctx), void *ctx);",
                  "sdk/include/zr/abi/tier.h:15: zr_sink in typedef void (*zr_sink)(void *ctx);"));
}

TEST_F(ArchitectureRulesTest, FindsAScriptThatBashCannotParse) {
  plant("tests/bench/swallowed.sh", "if ((1)); then  # why exit 1; fi\necho done\n");
  plant(".ci/open", "#!/usr/bin/env bash\necho 'one\n");
  plant("tests/bench/whole.sh", "if ((1)); then  # why\n  exit 1\nfi\n");
  plant(".ci/other", "#!/usr/bin/env python3\nif (x):\n  y(\"'\")\n");
  plant(".ci/list.txt", "it's a list\n");
  EXPECT_THAT(found(broken_scripts), ElementsAre(testing::HasSubstr(".ci/open: line 2: "),
                                                 testing::HasSubstr("tests/bench/swallowed.sh: line ")));
}

TEST_F(ArchitectureRulesTest, FindsAHeaderThatLintIgnores) {
  plant("core/engine/session.hpp", "");
  plant("core/api/include/zr/engine.hpp", "");
  plant(".clang-tidy", "HeaderFilterRegex: '/(core|sdk)/.*\\.hpp$'\n");
  EXPECT_THAT(found(unlinted_headers), ElementsAre("core/engine/session.hpp"));
  plant(".clang-tidy", "HeaderFilterRegex: '/(core|lint/include)/.*\\.hpp$'\n");
  EXPECT_THAT(found(unlinted_headers), IsEmpty());
  plant(".clang-tidy", "Checks: '*'\n");
  EXPECT_THAT(found(unlinted_headers), ElementsAre(".clang-tidy: no HeaderFilterRegex"));
}

TEST_F(ArchitectureRulesTest, FindsAnUnexpectedTopLevelFolder) {
  plant("core/README.md", "");
  plant("docs/index.md", "");
  plant("lib/a.cpp", "");
  EXPECT_THAT(found(strange_folders), ElementsAre("lib"));
}

TEST(UndocumentedTest, AcceptsACommentAboveOrOnTheLineOfADeclaration) {
  EXPECT_THAT(undocumented({"class A {", " public:", "  int size() const;  // elements", "  int capacity() const;",
                            "  /// Empties it.", "  void clear();", "", "  void fill(int with,", "            int n);",
                            " private:", "  int n();", "};"},
                           false),
              ElementsAre("4: int capacity() const", "8: void fill(int with, int n)"));
}

TEST(UndocumentedTest, AppliesACommentToAShortRunWithoutBlankLines) {
  EXPECT_THAT(undocumented({"/// Its sides.", "int left(int a);", "int right(int a);", "", "int top(int a);"}, false),
              ElementsAre("5: int top(int a)"));
  EXPECT_THAT(
      undocumented({"/// All five.", "int a(int);", "int b(int);", "int c(int);", "int d(int);", "int e(int);"}, false),
      ElementsAre("3: int b(int)", "4: int c(int)", "5: int d(int)", "6: int e(int)"));
  EXPECT_THAT(undocumented({"/// The first.", "int a(int);", "int b(int);  // the second", "int c(int);"}, false),
              ElementsAre("4: int c(int)"));
}

TEST(UndocumentedTest, AppliesATypeCommentToItsFirstRun) {
  EXPECT_THAT(undocumented(
                  {"/// A pair.", "struct Pair {", "  int sum() const;", "", "  int first(int n) const;", "};"}, false),
              ElementsAre("5: int first(int n) const"));
}

TEST(UndocumentedTest, AppliesACommentToTheOverloadsThatFollow) {
  EXPECT_THAT(undocumented({"/// Adds.", "float add(float a) {", "  // in one", "  return a;", "}",
                            "double add(double a);", "int sub(int a);"},
                           false),
              ElementsAre("7: int sub(int a)"));
}

TEST(UndocumentedTest, IgnoresDeclarationsThatNeedNoComment) {
  EXPECT_THAT(undocumented({"#define TWICE(x) \\",
                            "  int twice(x);",
                            "class B final : public A {",
                            " public:",
                            "  B() = default;",
                            "  B(const B&) = delete;",
                            "  ~B();",
                            "  int size() const override;",
                            "  std::function<void(int)> then;",
                            "  int n = count(3);",
                            "  using F = int (*)(int);",
                            " protected:",
                            "  int hidden();",
                            "};",
                            "enum class E { a = f(1) };",
                            "template <class T>",
                            "int B::defined_outside(T t) {",
                            "  return t(1);",
                            "}",
                            "static_assert(sizeof(B) > 0);"},
                           false),
              IsEmpty());
}

TEST(UndocumentedTest, AcceptsOneLineBodiesAndGettersInSubsystemHeaders) {
  const std::vector<std::string> header{"int one() { return 1; }",       "int two() {",    "  return 2;", "}",
                                        "virtual int rank() const = 0;", "int set(int n);"};
  EXPECT_THAT(undocumented(header, true), ElementsAre("2: int two()", "6: int set(int n)"));
  EXPECT_EQ(undocumented(header, false).size(), 4u);
}

}  // namespace
}  // namespace zr::arch
