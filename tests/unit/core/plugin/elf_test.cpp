#include "plugin/elf.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "support/scratch.hpp"

namespace zr::host {

namespace {
const std::string kLibrary = ZR_BUILD_DIR "/tests/plugins/good/zr_optimizer_bad.so";

std::string bytes_of(const std::string& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}
}  // namespace

TEST(ExportedSymbolsTest, FindsTheTagsOfALibrary) {
  const auto found = plugin::exported_symbols(kLibrary, "zrabi");
  ASSERT_TRUE(found);
  std::vector<std::string> names = *found;
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"zr_tag_abi_0_9", "zr_tag_kind_optimizer_1"}));
}

TEST(ExportedSymbolsTest, FindsTheTagsOfAStrippedLibrary) {
  const test::Scratch scratch;
  const std::string copy = scratch.copy(kLibrary);
  ASSERT_EQ(std::system(("strip --strip-all " + copy).c_str()), 0);
  ASSERT_LT(bytes_of(copy).size(), bytes_of(kLibrary).size());
  EXPECT_EQ(plugin::exported_symbols(copy, "zrabi")->size(), 2u);
}

TEST(ExportedSymbolsTest, FindsAllExports) {
  std::vector<std::string> names;
  for (const plugin::ExportedSymbol& symbol : plugin::all_exports(kLibrary)) names.push_back(symbol.name);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"zr_module_v1", "zr_tag_abi_0_9", "zr_tag_kind_optimizer_1"}));
}

TEST(ExportedSymbolsTest, FindsNothingInAMissingSection) {
  EXPECT_TRUE(plugin::exported_symbols(kLibrary, "nosuch")->empty());
}

TEST(ExportedSymbolsTest, RejectsAFileThatIsNotALibrary) {
  EXPECT_FALSE(plugin::exported_symbols(ZR_SOURCE_DIR "/CMakeLists.txt", "zrabi"));
  EXPECT_FALSE(plugin::exported_symbols("/nowhere", "zrabi"));
  EXPECT_FALSE(plugin::exported_symbols(ZR_SOURCE_DIR, "zrabi"));
}

TEST(ExportedSymbolsTest, SurvivesTruncationAndHeaderCorruption) {
  const test::Scratch scratch;
  const std::string whole = bytes_of(kLibrary);
  const auto tags = [&](std::string bytes) {
    const std::string file = scratch.write("cut.so", bytes);
    const auto found = plugin::exported_symbols(file, "zrabi");
    EXPECT_LE(plugin::all_exports(file).size(), 3u);  // the entry and two tags
    return found ? found->size() : 0;
  };
  for (std::size_t n = 0; n < whole.size(); n += 1 + whole.size() / 200) EXPECT_LE(tags(whole.substr(0, n)), 2u);
  for (std::size_t i = 0; i < 64; ++i) {
    std::string changed = whole;
    changed[i] = static_cast<char>(changed[i] ^ 0xff);
    EXPECT_LE(tags(changed), 2u);
  }
}

}  // namespace zr::host
