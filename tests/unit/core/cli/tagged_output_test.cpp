// Splits the output of `mpirun --tag-output`, however it is cut into pieces.
#include "cli/tagged_output.hpp"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace {

using zr::host::cli::TaggedOutput;

// What each rank has written, by rank (-1: mpirun, one line per call) and stream.
using Texts = std::map<std::pair<int, bool>, std::string>;
Texts texts_of(const std::string& output, std::size_t piece) {
  Texts texts;
  TaggedOutput tagged([&](int rank, bool error, std::string_view text) {
    texts[{rank, error}] += std::string(text) + (rank < 0 ? "\n" : "");
  });
  for (std::size_t i = 0; i < output.size(); i += piece) tagged.bytes(std::string_view(output).substr(i, piece));
  tagged.end();
  return texts;
}

TEST(TaggedOutputTest, SeparatesRanksAndMpirunForPiecesOfAnySize) {
  const std::string output =
      "[1,0]<stdout>:step 1\n[1,12]<stderr>:a [warning]\nmpirun: lost [connection\n[1,0]<stdout>:loss [1,2] [1,"
      "[1,12]<stdout>:no newline[1,0]<stdout>:\n[1,3]<stddiag>:text\n-----\nlast";
  const Texts expected{{{0, false}, "step 1\nloss [1,2] [1,\n"},
                       {{12, true}, "a [warning]\n"},
                       {{12, false}, "no newline"},
                       {{3, true}, "text\n"},
                       {{-1, false}, "mpirun: lost [connection\n-----\nlast\n"}};
  for (std::size_t piece = 1; piece <= output.size(); ++piece) EXPECT_EQ(texts_of(output, piece), expected) << piece;
}

TEST(TaggedOutputTest, KeepsTextThatOnlyBeginsLikeATag) {
  for (const std::string text :
       {"[1,2]<stdin>:x", "[,2]<stdout>:x", "[1,]<stdout>:x", "[1,2]<stdout:x", "[", "[1,99999999999]<stdout>:x"})
    EXPECT_EQ(texts_of("[1,0]<stdout>:" + text + "\n", 3), (Texts{{{0, false}, text + "\n"}})) << text;
}

}  // namespace
