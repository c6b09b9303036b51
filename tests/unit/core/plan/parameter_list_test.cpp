// Reads parameters from a program's answer and derives them from model sizes.
#include "plan/parameter_list.hpp"

#include <gtest/gtest.h>

#include "support/said_by.hpp"

namespace {

using namespace zr::host;
using zr::test::said_by;

TEST(ParameterListTest, ReadsTheLastMatchingLineOfAProgramsOutput) {
  const std::vector<plan::Parameter> written{{"a", {"b", "c"}, {3, 4}, 12, false, 0}, {"f", {}, {}, 1, true, 0}};
  const auto read = plan::parameters_from_json("loading ...\n" + to_json(written) + "\nbye\n", "it");
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].name, "a");
  EXPECT_EQ(read[0].aliases, written[0].aliases);
  EXPECT_EQ(read[0].shape, written[0].shape);
  EXPECT_EQ(read[0].count, 12);
  EXPECT_FALSE(read[0].frozen);
  EXPECT_EQ(read[1].count, 1) << "a scalar";
  EXPECT_TRUE(read[1].frozen);
  EXPECT_EQ(said_by([] { plan::parameters_from_json("hello\n", "the program x"); }),
            "the program x did not print its parameters; its main() must construct a zr::Engine from its zr::Program");
}

int64_t total(const plan::Sizes& sizes) {
  int64_t count = 0;
  for (const plan::Parameter& p : parameters_of(complete(sizes))) count += p.count;
  return count;
}

TEST(ModelSizesTest, GiveAModelWithExactlyThatManyParameters) {
  for (const int64_t count : std::vector<int64_t>{1, 7, 25, 1000, 12345, 7'500'000'000, 1'000'000'000'000})
    EXPECT_EQ(total({count, 0, 0}), count);
  EXPECT_EQ(total({7'500'000'000, 40, 0}), 7'500'000'000);
  EXPECT_EQ(total({7'500'000'000, 0, 4096}), 7'500'000'000);
  EXPECT_EQ(total({0, 12, 768}), 12 * (12 * 768 * 768 + 13 * 768)) << "GPT-2's blocks";
  EXPECT_EQ(total({124'439'808, 12, 768}), 124'439'808) << "GPT-2 with its embeddings";
}

TEST(ModelSizesTest, RejectContradictingOrMissingSizes) {
  EXPECT_EQ(said_by([] {
              plan::complete({1000, 12, 768});
            }),
            "zeroth plan: 12 layers of width 768 alone have 85054464 parameters, more than the 1000 of --params; omit "
            "one of the three options");
  EXPECT_EQ(
      said_by([] {
        plan::complete({1'000'000'000, 10, 100});
      }),
      "zeroth plan: --params 1000000000, --layers 10 and --hidden 100 contradict each other: the layers have 1213000 "
      "parameters, and the rest would be an embedding of 9987870 rows; give two of the three options");
  EXPECT_EQ(said_by([] {
              plan::complete({0, 12, 0});
            }),
            "zeroth plan: give --params, or both --layers and --hidden; otherwise the size of the model is unknown");
}

}  // namespace
