// Words with a private meaning do not occur (tests/arch/words.txt).
#include "arch/words.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/scratch.hpp"

namespace zr::arch {
namespace {

const std::filesystem::path kTree = ZR_SOURCE_DIR;

TEST(WordsTest, FindsNoWordWithAPrivateMeaning) {
  EXPECT_EQ(private_words(kTree, kTree / "tests/arch/words.txt"), std::vector<std::string>());
}

TEST(WordsTest, FindsFullWordsInCodeAndText) {
  const test::Scratch tree;
  tree.write("words.txt", "# comment\nkeep\nto be seen\n=Fated\n");
  tree.write("core/a.cpp", "int keep = 1;\nint housekeep;\nint keep_2;\nclass Fated;\nint fated;\n");
  tree.write("core/a.bash", "# two keeps\n# keepsake\n");
  tree.write("core/manifest.json", "{\"keep\": 1}\n");
  tree.write("docs/b.md", "It is To be seen.\nTo be seeing\n");
  tree.write("README.md", "Keep.\n");
  EXPECT_THAT(private_words(tree.folder(), tree.folder() / "words.txt"),
              ::testing::ElementsAre("README.md:1: Keep.", "core/a.bash:1: # two keeps", "core/a.cpp:1: int keep = 1;",
                                     "core/a.cpp:3: int keep_2;", "core/a.cpp:4: class Fated;",
                                     "docs/b.md:1: It is To be seen."));
}

}  // namespace
}  // namespace zr::arch
