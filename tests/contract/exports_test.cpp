// What a plug-in's file shows to the process that loads it: the entry, its tags, and nothing that could meet another's symbol.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <regex>

#include "contract/shell.hpp"

namespace zr::testing {
namespace {

std::vector<std::filesystem::path> plugins() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(ZR_BUILD_DIR "/plugins")) {
    if (entry.path().extension() == ".so") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

TEST(Exports, AreTheEntryAndTheTagsOnly) {
  ASSERT_GE(plugins().size(), 2u);
  const std::regex name(R"(zr_(strategy|communicator|optimizer|offload)_[a-z][a-z0-9_]*\.so)");
  for (const auto& file : plugins()) {
    std::smatch match;
    const std::string file_name = file.filename();
    ASSERT_TRUE(std::regex_match(file_name, match, name)) << file;
    std::vector<std::string> expected = {"zr_module_v1", "zr_tag_abi_0_1", "zr_tag_kind_" + match[1].str()}, found;
    for (const std::string& line : shell("nm -D --defined-only " + file.string()).lines()) {
      found.push_back(line.substr(line.rfind(' ') + 1));
    }
    std::sort(found.begin(), found.end());
    EXPECT_EQ(found, expected) << file;
  }
}

TEST(Exports, HoldNoSymbolThatIsUniqueInTheProcess) {
  for (const auto& file : plugins()) {
    EXPECT_EQ(shell("readelf --dyn-syms -W " + file.string()).output.find("UNIQUE"), std::string::npos) << file;
  }
}

TEST(Exports, NeedNeitherLibtorchNorTheHost) {
  const std::regex foreign(R"(\[lib(torch|c10|zr|zeroth|boost|cuda)[^\]]*\])");
  for (const auto& file : plugins()) {
    const std::string dynamic = shell("readelf -dW " + file.string()).output;
    EXPECT_FALSE(std::regex_search(dynamic, foreign)) << file << "\n" << dynamic;
    EXPECT_EQ(dynamic.find("TEXTREL"), std::string::npos) << file;
    EXPECT_EQ(dynamic.find("STATIC_TLS"), std::string::npos) << file;
    EXPECT_NE(dynamic.find("NOW"), std::string::npos) << file;
    EXPECT_FALSE(std::regex_search(shell("readelf -lW " + file.string()).output, std::regex("GNU_STACK.*RWE"))) << file;
  }
}

TEST(Exports, OfOptimizersContractNoMultiplyAndAdd) {
  for (const auto& file : plugins()) {
    if (file.filename().string().rfind("zr_optimizer_", 0) != 0) continue;
    const std::string code = shell("objdump -d --no-show-raw-insn " + file.string()).output;
    EXPECT_FALSE(std::regex_search(code, std::regex("\\bvfn?m(add|sub)"))) << file;
  }
}

}  // namespace
}  // namespace zr::testing
