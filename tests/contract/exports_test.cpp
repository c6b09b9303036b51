// The symbols that a plug-in exports: its entry point and its tags, and nothing that could collide with another symbol.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "support/shell.hpp"

namespace zr::testing {
namespace {

/// Lines of a command's output that match; for grep -E.
std::string lines_with(const std::string& pattern, const std::string& command) {
  return shell(command + " | grep -E '" + pattern + "'").output;
}

std::vector<std::filesystem::path> plugins() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(ZR_BUILD_DIR "/plugins")) {
    if (entry.path().extension() == ".so") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

TEST(PluginExportsTest, ContainOnlyTheEntryPointAndTheTags) {
  ASSERT_GE(plugins().size(), 2u);
  for (const auto& file : plugins()) {
    const std::string name = file.stem(), what = name.substr(3),  // <role>_<id>
        role = what.substr(0, what.find('_'));
    std::vector<std::string> expected = {"zr_module_v1", "zr_tag_abi_0_9", "zr_tag_id_" + what,
                                         "zr_tag_kind_" + role + "_1", "zr_tag_multiply_add"},
                             found;
    if (what == "communicator_mpi") expected.push_back("zr_tag_several_hosts");
    std::sort(expected.begin(), expected.end());
    for (const std::string& line : shell("nm -D --defined-only " + file.string()).lines()) {
      found.push_back(line.substr(line.rfind(' ') + 1));
    }
    std::sort(found.begin(), found.end());
    // A library that uses a draft header loads only on a host of its version: among ours, some optimizers do.
    if (role == "optimizer") std::erase(found, "zr_tag_draft_0_9");
    EXPECT_EQ(found, expected) << file;
  }
}

TEST(PluginExportsTest, ContainNoUniqueSymbol) {
  for (const auto& file : plugins()) {
    EXPECT_EQ(shell("readelf --dyn-syms -W " + file.string()).output.find("UNIQUE"), std::string::npos) << file;
  }
}

TEST(PluginExportsTest, DependOnNeitherLibtorchNorTheHost) {
  for (const auto& file : plugins()) {
    const std::string dynamic = "readelf -dW " + file.string();
    EXPECT_EQ(lines_with("NEEDED.*lib(torch|c10|zr|zeroth|boost|cuda)", dynamic), "") << file;
    EXPECT_EQ(lines_with("TEXTREL|STATIC_TLS", dynamic), "") << file;
    EXPECT_NE(lines_with("FLAGS.*NOW", dynamic), "") << file << ": symbols must be bound at load time";
    EXPECT_NE(lines_with("GNU_STACK.* RW ", "readelf -lW " + file.string()), "")
        << file << ": the stack must not be executable";
  }
}

TEST(PluginExportsTest, OptimizersContainNoFusedMultiplyAdd) {
  for (const auto& file : plugins()) {
    if (file.filename().string().rfind("zr_optimizer_", 0) != 0) continue;
    const std::string code = "objdump -d --no-show-raw-insn " + file.string();
    EXPECT_NE(lines_with("\\bv?mul[ps]s", code), "") << file << ": objdump shows no code";
    EXPECT_EQ(lines_with("\\bvfn?m(add|sub)", code), "") << file;
  }
}

}  // namespace
}  // namespace zr::testing
