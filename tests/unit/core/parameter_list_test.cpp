// Parameters from a program's answer, from safetensors files, from sizes.
#include "plan/parameter_list.hpp"

#include <gtest/gtest.h>

#include "base/failure.hpp"
#include "scratch.hpp"

namespace {

using namespace zr::host;

std::string said_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.exit(), Exit::user);
    return failure.what();
  }
  return "nothing";
}

TEST(ParameterList, OfAProgramIsTheLastLineThatSaysSo) {
  const std::vector<Parameter> told{{"a", {"b", "c"}, {3, 4}, 12, false, 0}, {"f", {}, {}, 1, true, 0}};
  const auto read = parameters_from_json("loading ...\n" + to_json(told) + "\nbye\n", "it");
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].name, "a");
  EXPECT_EQ(read[0].aliases, told[0].aliases);
  EXPECT_EQ(read[0].shape, told[0].shape);
  EXPECT_EQ(read[0].count, 12);
  EXPECT_FALSE(read[0].frozen);
  EXPECT_EQ(read[1].count, 1) << "a scalar";
  EXPECT_TRUE(read[1].frozen);
  EXPECT_EQ(said_by([] { parameters_from_json("hello\n", "the program x"); }),
            "the program x did not say what it trains: its main() must construct a zr::Engine from its zr::Program");
}

// A safetensors file with that header and no data.
std::string safetensors(const std::string& header) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes + header;
}

TEST(Safetensors, GiveFloatingTensorsInTheOrderOfTheFile) {
  const zr::test::Scratch scratch;
  const std::string first = scratch.write(
      "a.safetensors",
      safetensors(R"({"__metadata__":{"format":"pt"},"z":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},
                                       "a":{"dtype":"BF16","shape":[5],"data_offsets":[12,22]},
                                       "ids":{"dtype":"I64","shape":[9],"data_offsets":[22,94]}})"));
  const std::string second =
      scratch.write("b.safetensors", safetensors(R"({"scalar":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})"));
  const TensorFile one = read_safetensors({first});
  ASSERT_EQ(one.parameters.size(), 2u);
  EXPECT_EQ(one.parameters[0].name, "z");
  EXPECT_EQ(one.parameters[0].count, 6);
  EXPECT_EQ(one.parameters[1].name, "a");
  EXPECT_EQ(one.dtype, ZR_BF16);
  const TensorFile both = read_safetensors({first, second});
  EXPECT_EQ(both.parameters.size(), 3u);
  EXPECT_EQ(both.dtype, ZR_NONE) << "they share no type";
}

TEST(Safetensors, ThatAreNoneAreRefusedByName) {
  const zr::test::Scratch scratch;
  const auto refused = [&](const std::string& bytes) {
    const std::string file = scratch.write("x", bytes), said = said_by([&] { read_safetensors({file}); });
    return said.rfind(file + ": ", 0) == 0 ? said.substr(file.size() + 2) : "without the file's name: " + said;
  };
  const std::string is_none = "is no safetensors file: ", remedy = "; name one (model.safetensors)";
  const std::string no_length = is_none + "its first eight bytes are not the length of a header" + remedy;
  EXPECT_EQ(refused(""), no_length);
  EXPECT_EQ(refused("a text, not a file of tensors"), no_length);
  EXPECT_EQ(refused(safetensors("{}").substr(0, 9)), no_length) << "cut off";
  EXPECT_EQ(refused(safetensors("[1, 2]")), is_none + "its header is no JSON object" + remedy);
  EXPECT_EQ(refused(safetensors(R"({"w":{"dtype":"F32"}})")),
            is_none + "its header does not give 'w' a dtype, a shape and offsets" + remedy);
  EXPECT_EQ(refused(safetensors(R"({"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})")),
            is_none + "the shape of 'w' is none" + remedy);
  EXPECT_EQ(refused(safetensors(R"({"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}})")),
            is_none + "the shape of 'w' is none" + remedy);
  EXPECT_EQ(refused(safetensors(R"({"w":{"dtype":"I64","shape":[4],"data_offsets":[0,4]}})")),
            "holds no floating-point tensor; name a model's file");
  EXPECT_EQ(said_by([] { read_safetensors({"/nowhere/x"}); }),
            "/nowhere/x: cannot be read: No such file or directory; name a safetensors file");
}

int64_t total(const Sizes& sizes) {
  int64_t count = 0;
  for (const Parameter& p : parameters_of(complete(sizes))) count += p.count;
  return count;
}

TEST(Sizes, GiveAModelOfExactlySoManyParameters) {
  for (const int64_t count : std::vector<int64_t>{1, 7, 25, 1000, 12345, 7'500'000'000, 1'000'000'000'000})
    EXPECT_EQ(total({count, 0, 0}), count);
  EXPECT_EQ(total({7'500'000'000, 40, 0}), 7'500'000'000);
  EXPECT_EQ(total({7'500'000'000, 0, 4096}), 7'500'000'000);
  EXPECT_EQ(total({0, 12, 768}), 12 * (12 * 768 * 768 + 13 * 768)) << "GPT-2's blocks";
}

TEST(Sizes, ThatContradictOneAnotherOrAreTooFewAreRefused) {
  EXPECT_EQ(said_by([] {
              complete({1000, 12, 768});
            }),
            "zeroth plan: 12 layers of width 768 alone have 85054464 parameters, more than the 1000 of --params; leave "
            "one of the three out");
  EXPECT_EQ(said_by([] {
              complete({0, 12, 0});
            }),
            "zeroth plan: give --params, or both --layers and --hidden: with less the model's size is not known");
}

}  // namespace
