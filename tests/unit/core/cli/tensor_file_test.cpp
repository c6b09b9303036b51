// Reads models from safetensors files, and rejects invalid files.
#include "cli/tensor_file.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "support/said_by.hpp"
#include "support/scratch.hpp"

namespace {

using namespace zr::host;
using zr::test::said_by;

// A safetensors file with this header and `data` bytes of data.
std::string safetensors(const std::string& header, std::size_t data = 0) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes + header + std::string(data, '\0');
}

TEST(ReadSafetensorsTest, ReturnsFloatingPointTensorsInFileOrder) {
  const zr::test::Scratch scratch;
  const std::string first = scratch.write(
      "a.safetensors",
      safetensors(R"({"__metadata__":{"format":"pt"},"z":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},
                                       "a":{"dtype":"BF16","shape":[5],"data_offsets":[12,22]},
                                       "ids":{"dtype":"I64","shape":[9],"data_offsets":[22,94]}})",
                  94));
  const std::string second =
      scratch.write("b.safetensors", safetensors(R"({"scalar":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4));
  const cli::TensorFile one = cli::read_safetensors({first});
  ASSERT_EQ(one.parameters.size(), 2u);
  EXPECT_EQ(one.parameters[0].name, "z");
  EXPECT_EQ(one.parameters[0].count, 6);
  EXPECT_EQ(one.parameters[1].name, "a");
  EXPECT_EQ(one.dtype, ZR_BF16);
  const cli::TensorFile both = cli::read_safetensors({first, second});
  EXPECT_EQ(both.parameters.size(), 3u);
  EXPECT_EQ(both.dtype, ZR_NONE) << "the tensors have different dtypes";
}

TEST(ReadSafetensorsTest, RejectsAFileThatIsNotSafetensors) {
  const zr::test::Scratch scratch;
  const auto rejected = [&](const std::string& bytes) {
    const std::string file = scratch.write("x", bytes), said = said_by([&] { cli::read_safetensors({file}); });
    return said.rfind(file + ": ", 0) == 0 ? said.substr(file.size() + 2) : "without the file's name: " + said;
  };
  const std::string is_none = "is not a safetensors file: ";
  const std::string remedy = "; name a safetensors file, for example model.safetensors";
  const std::string no_length = is_none + "its first eight bytes are not the length of a header" + remedy;
  EXPECT_EQ(rejected(""), no_length);
  EXPECT_EQ(rejected("a text, not a file of tensors"), no_length);
  EXPECT_EQ(rejected(safetensors("{}").substr(0, 9)), no_length) << "cut off";
  EXPECT_EQ(rejected(safetensors("[1, 2]")), is_none + "its header is not a JSON object" + remedy);
  EXPECT_EQ(rejected(safetensors(R"({"w":{"dtype":"F32"}})")),
            is_none + "its header lacks dtype, shape or data_offsets for 'w'" + remedy);
  EXPECT_EQ(rejected(safetensors(R"({"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})")),
            is_none + "invalid shape for 'w'" + remedy);
  EXPECT_EQ(rejected(safetensors(R"({"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}})")),
            is_none + "invalid shape for 'w'" + remedy);
  EXPECT_EQ(rejected(safetensors(R"({"w":{"dtype":"I64","shape":[4],"data_offsets":[0,32]}})", 32)),
            "the file has no floating-point tensor; give a file with a model's weights");
  EXPECT_EQ(rejected(safetensors(R"({"w":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4)),
            is_none + "invalid shape for 'w'" + remedy);
  EXPECT_EQ(rejected(safetensors(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                                 R"("w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                                 8)),
            is_none + "its header has 'w' twice" + remedy);
  EXPECT_EQ(rejected(safetensors(R"({"w":{"dtype":"F32","shape":[1],"dtype":"F32","data_offsets":[0,4]}})", 4)),
            is_none + "its header has 'dtype' twice" + remedy);
  EXPECT_EQ(rejected(safetensors(R"({"w":{"dtype":"F32","shape":[1],)"
                                 R"("data_offsets":[9223372036854775804,9223372036854775808]}})",
                                 4)),
            is_none + "the data_offsets of 'w' are not two valid offsets" + remedy);
  EXPECT_EQ(rejected(safetensors(R"({"w\n":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8)),
            is_none + "'w\\n' begins at byte 4, but the tensors before it end at byte 0" + remedy);
  EXPECT_EQ(said_by([] { cli::read_safetensors({"/nowhere/x"}); }),
            "/nowhere/x: cannot be read: No such file or directory; name a safetensors file");
}

TEST(ReadSafetensorsTest, RejectsATensorThatTwoFilesContain) {
  const zr::test::Scratch scratch;
  const std::string bytes = safetensors(R"({"w":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4);
  const std::string a = scratch.write("a", bytes), b = scratch.write("b", bytes);
  EXPECT_EQ(said_by([&] {
              cli::read_safetensors({a, b});
            }),
            b + ": tensor 'w' is also in " + a + "; give the files of one model, each only once");
}

TEST(ReadSafetensorsTest, RejectsAPathThatIsNotARegularFile) {
  const zr::test::Scratch scratch;
  ASSERT_EQ(::mkfifo(scratch.path("fifo").c_str(), 0600), 0);
  const std::string remedy = ", not a regular file; replace it with the file itself";
  EXPECT_EQ(said_by([&] { cli::read_safetensors({scratch.path("fifo")}); }),
            scratch.path("fifo") + ": is a FIFO" + remedy);
  EXPECT_EQ(said_by([&] { cli::read_safetensors({scratch.path("")}); }), scratch.path("") + ": is a folder" + remedy);
  EXPECT_EQ(said_by([&] { cli::read_safetensors({"/dev/zero"}); }), "/dev/zero: is a device" + remedy);
}

}  // namespace
