// Splits the output of `mpirun --tag-output`, which arrives in packets.
#include "cli/tagged_output.hpp"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace {

using zr::host::cli::TaggedOutput;

// What each rank has written, by rank (-1: mpirun, one line per call) and stream.
using Texts = std::map<std::pair<int, bool>, std::string>;
// Writes that are longer than max_packet arrive as several packets.
Texts texts_of(const std::vector<std::string>& writes, std::size_t max_packet = 4096) {
  Texts texts;
  TaggedOutput tagged(max_packet, [&](int rank, bool error, std::string_view text) {
    texts[{rank, error}] += std::string(text) + (rank < 0 ? "\n" : "");
  });
  for (const std::string& write : writes)
    for (std::size_t i = 0; i < write.size(); i += max_packet)
      tagged.packet(std::string_view(write).substr(i, max_packet));
  tagged.end();
  return texts;
}

// As OpenMPI 4.1.4 writes them.
const std::vector<std::string> kWrites{"[1,0]<stdout>:step 1\n[1,0]<stdout>:\n[1,0]<stdout>:loss",
                                       "[1,12]<stderr>:a [warning]\n",
                                       "[1,0]<stdout>: 0.5\n",
                                       "mpirun: lost [connection\n-----\n",
                                       "[1,12]<stdout>:no newline",
                                       "[1,12]<stdout>:\n",
                                       "[1,3]<stddiag>:text\n",
                                       "last"};
const Texts kTexts{{{0, false}, "step 1\n\nloss 0.5\n"},
                   {{12, true}, "a [warning]\n"},
                   {{12, false}, "no newline\n"},
                   {{3, true}, "text\n"},
                   {{-1, false}, "mpirun: lost [connection\n-----\nlast\n"}};

TEST(TaggedOutputTest, SeparatesRanksAndMpirun) { EXPECT_EQ(texts_of(kWrites), kTexts); }

TEST(TaggedOutputTest, JoinsThePacketsOfALongWrite) {
  for (std::size_t max_packet = 17; max_packet < 50; ++max_packet) EXPECT_EQ(texts_of(kWrites, max_packet), kTexts);
}

TEST(TaggedOutputTest, TakesTagsInTheOutputOfAProgramAsText) {
  EXPECT_EQ(texts_of({"[1,0]<stdout>:x [1,3]<stdout>:y\n", "[1,0]<stdout>:a\n[1,0]<stdout>:[1,2]<stderr>:b\n",
                      "[1,0]<stdout>:unfinished", "[1,0]<stdout>:[1,1]<stdout>:c\n"}),
            (Texts{{{0, false}, "x [1,3]<stdout>:y\na\n[1,2]<stderr>:b\nunfinished[1,1]<stdout>:c\n"}}));
}

TEST(TaggedOutputTest, TakesTheBeginOfATagInALineOfMpirunAsText) {
  for (const std::string text :
       {"[", "[1,2]<stdin>:x", "[,2]<stdout>:x", "[1,]<stdout>:x", "[1,2]<stdout", "[1,99999999999]<stdout>:x"}) {
    EXPECT_EQ(texts_of({"[1,0]<stdout>:y", text}), (Texts{{{0, false}, "y"}, {{-1, false}, text + "\n"}})) << text;
    EXPECT_EQ(texts_of({text}, text.size()), (Texts{{{-1, false}, text + "\n"}})) << text;
  }
}

}  // namespace
