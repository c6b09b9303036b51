// The time to load, save and hash very many tensors grows linearly with their number, not quadratically.
#include "checkpoint/safetensors.hpp"
#include "multirank/checkpoint_fixture.hpp"

namespace zr::test {
namespace {

TEST_F(CheckpointTest, LoadsFilesOfManyTensorsInLinearTime) {
  const auto write = [&](const std::string& name, int extra) {
    host::TensorHeader header;
    int64_t at = 0;
    const auto add = [&](const std::string& tensor, std::vector<int64_t> shape) {
      int64_t bytes = 4;
      for (const int64_t n : shape) bytes *= n;
      header.tensors.push_back({tensor, "F32", std::move(shape), at, at + bytes});
      at += bytes;
    };
    add("in.weight", {8, 6});
    add("in.bias", {8});
    add("out.weight", {1, 8});
    add("out.bias", {1});
    for (const char* one : {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "level", "table"})
      add(one, {8});
    header.tensors.push_back({"norm.num_batches_tracked", "I64", {}, at, at + 8});
    at += 8;
    for (int i = 0; i < extra; ++i) add("other." + std::to_string(i) + ".weight", {1});
    const std::string bytes = host::write_header(header);
    scratch_.write(name, bytes + std::string(static_cast<std::size_t>(at), '\0'));
  };
  write("c-few.safetensors", 10000);
  write("c-many.safetensors", 100000);
  const Outcome done = shell("CHECKPOINT=" + scratch_.path("c") + " " + launch(1, "buffers_case loads_large", ""));
  EXPECT_EQ(done.code, 0) << done.output;
  std::printf("%s", done.output.c_str());
}

TEST_F(CheckpointTest, SavesLoadsAndHashesManyParametersInLinearTime) {
  const Outcome done = shell(launch(1, "buffers_case saves_large", ""));
  EXPECT_EQ(done.code, 0) << done.output;
  std::printf("%s", done.output.c_str());
}

}  // namespace
}  // namespace zr::test
