// How the kernels for CUDA are compiled.
#include <gmock/gmock.h>

#include <fstream>
#include <regex>
#include <string>
#include <vector>

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

// The commands that compile the kernels of plug-ins, without those of tests.
std::vector<std::string> commands_of_kernels() {
  std::ifstream in(ZR_BUILD_DIR "/compile_commands.json");
  static const std::regex command("-x cu -c " ZR_SOURCE_DIR "/plugins/\\S*\\.cu ");
  std::vector<std::string> commands;
  for (std::string line; std::getline(in, line);)
    if (std::regex_search(line, command)) commands.push_back(line);
  return commands;
}

TEST(CudaBuildTest, EveryKernelHasCodeForAmpereHopperBlackwellAndPtxForLaterOnes) {
#ifndef ZR_HAS_NVCC
  GTEST_SKIP() << "the build has no CUDA";
#elif !defined(ZR_CUDA_DEFAULT_ARCHITECTURES)
  GTEST_SKIP() << "ZR_CUDA_ARCHITECTURES is not the default";
#else
  const std::vector<std::string> commands = commands_of_kernels();
  EXPECT_GE(commands.size(), 7u);  // three optimizers, norm blocks, and the communicators'
  const bool has_100 = std::string(ZR_CUDA_DEFAULT_ARCHITECTURES).ends_with("100");  // nvcc 12.8 and newer
  for (const std::string& command : commands) {
    for (const char* const real : {"compute_80,code=[sm_80]", has_100 ? "compute_90,code=[sm_90]" : ",sm_90]"})
      EXPECT_THAT(command, testing::HasSubstr(real));
    EXPECT_THAT(command, testing::HasSubstr(has_100 ? "compute_100,code=[compute_100,sm_100]"
                                                    : "compute_90,code=[compute_90,sm_90]"));
  }
#endif
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
