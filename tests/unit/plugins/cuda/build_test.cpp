// How the kernels for CUDA are compiled.
#include <gmock/gmock.h>

#include <fstream>
#include <regex>
#include <string>

#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

// The command that compiles the kernel of AdamW for CUDA, up to its source, for one architecture; "" if the build has
// none.
std::string command_of_adamw() {
  std::ifstream in(ZR_BUILD_DIR "/compile_commands.json");
  static const std::regex command("\"command\": \"(.*-x cu) -c \\S*/adamw/kernel\\.cu ");
  for (std::string line; std::getline(in, line);)
    if (std::smatch match; std::regex_search(line, match, command))
      return std::regex_replace(match[1].str(), std::regex("--generate-code=arch=compute_(?!90)\\S+"), "");
  return "";
}

// Ninety-six numbers of each thread are alive at once.
constexpr const char* kManyRegisters = R"(
__global__ void add_products(const float* in, float* out) {
  float values[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) values[i] = in[i * 256 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) out[i * 256 + threadIdx.x] = values[95 - i] * values[i];
}
)";

TEST(CudaBuildTest, ARegisterSpillFailsTheBuild) {
  const std::string command = command_of_adamw();
#ifndef ZR_HAS_NVCC
  GTEST_SKIP() << "the build has no CUDA";
#endif
  ASSERT_NE(command, "") << "compile_commands.json has no command for adamw/kernel.cu";
  const zr::test::Scratch scratch;
  scratch.write("many.cu", kManyRegisters);
  const std::string compile = command + " -c " + (scratch.folder() / "many.cu").string() + " -o /dev/null";
  const auto kept = zr::testing::shell(compile);
  EXPECT_EQ(kept.code, 0) << kept.output;
  const auto spilled = zr::testing::shell(compile + " -maxrregcount=32");
  EXPECT_NE(spilled.code, 0);
  EXPECT_THAT(spilled.output, testing::HasSubstr("spill"));
}

}  // namespace
