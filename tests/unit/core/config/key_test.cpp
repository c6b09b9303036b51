#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "base/error.hpp"
#include "config/key_json.hpp"
#include "support/sample_keys.hpp"

namespace zr::host {

TEST(HostKeysTest, HasValidUniqueKeysWithMeanings) {
  std::set<std::string> paths;
  for (const config::ConfigKey& key : config::host_keys()) {
    EXPECT_EQ(declaration_problem(key), "") << key.path();
    EXPECT_TRUE(paths.insert(key.path()).second) << key.path();
    EXPECT_GE(key.meaning.size(), 8u) << key.path();
    EXPECT_FALSE(key.def.empty()) << key.path();  // a job file of three lines must be enough
  }
  EXPECT_GE(paths.size(), 40u);
}

TEST(ConfigKeyTest, IsReadFromAComponentSchema) {
  const zr_key eps{sizeof(zr_key), ZR_KEY_FLOAT, ZR_KEY_PER_GROUP, 0, "eps", "1e-8", 0, 1, nullptr, "keeps from zero"};
  const zr_key mode{sizeof(zr_key), ZR_KEY_STRING, 0, 0, "mode", nullptr, -INFINITY, INFINITY, "fast|exact", "how"};
  const zr_key* list[] = {&eps, &mode};
  const auto keys = config::keys_of(list, 2, "optimizer.x");
  ASSERT_EQ(keys.size(), 2u);
  EXPECT_EQ(keys[0].path(), "optimizer.x.eps");
  EXPECT_TRUE(keys[0].per_group);
  EXPECT_EQ(config::range_text(keys[0]), "0 to 1");
  EXPECT_EQ(keys[1].def, "");
  EXPECT_EQ(keys[1].choices, (std::vector<std::string>{"fast", "exact"}));
  EXPECT_EQ(config::range_text(keys[1]), "fast|exact");
}

TEST(ConfigKeyTest, ReportsInvalidDeclarations) {
  config::ConfigKey key{"a", "b", ZR_KEY_INT, "1", "a number"};
  EXPECT_EQ(declaration_problem(key), "");
  key.def = "x";
  EXPECT_EQ(declaration_problem(key),
            "the default of key 'a.b': 'x' is not a TOML value; a text has quotes of its own, in C \"\\\"x\\\"\"");
  key.def = "\"1\"";
  EXPECT_EQ(declaration_problem(key), "the default of key 'a.b': expected an integer, found \"1\"");
  key.def = "1";
  key.min = 2;
  EXPECT_EQ(declaration_problem(key), "the default of key 'a.b': expected at least 2, found 1");
  key.max = 1;
  EXPECT_EQ(declaration_problem(key), "the key 'a.b' has an empty range");
  key.type = 99;
  EXPECT_EQ(declaration_problem(key), "the key 'a.b' has the unknown type 99");
  key.name = "b.c";
  EXPECT_EQ(declaration_problem(key), "the key's name 'b.c' is not a bare TOML key");
  EXPECT_EQ(config::declaration_problem({"a", "b", ZR_KEY_INT, "1", "two\nlines"}),
            "the key 'a.b' needs a meaning of exactly one line");
}

TEST(ConfigKeyTest, RoundTripsThroughJson) {
  const auto before = sample::keys();
  const auto after =
      config::keys_from_json("a line of the program's own\n" + to_json(before) + "\nand another\n", "the program");
  ASSERT_EQ(after.size(), before.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(after[i].path(), before[i].path());
    EXPECT_EQ(after[i].type, before[i].type);
    EXPECT_EQ(after[i].def, before[i].def);
    EXPECT_EQ(after[i].meaning, before[i].meaning);
    EXPECT_EQ(after[i].min, before[i].min);
    EXPECT_EQ(after[i].max, before[i].max);
    EXPECT_EQ(after[i].choices, before[i].choices);
  }
}

TEST(ConfigKeyTest, ReportsAProgramThatPrintsNoKeys) {
  try {
    config::keys_from_json("hello\n", "the program /bin/echo");
    FAIL();
  } catch (const Error& failure) {
    EXPECT_STREQ(failure.what(),
                 "the program /bin/echo did not print the keys it reads; construct zr::Program (or zr::Engine from a "
                 "file) first in its main()");
  }
}

}  // namespace zr::host
