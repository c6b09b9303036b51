// tests/gpu/pack and tests/gpu/run: a package whose parts run on the simulated device, and packages with programs that
// fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>

#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using zr::testing::Outcome, zr::testing::shell;
namespace fs = std::filesystem;

const std::string kGpu = ZR_SOURCE_DIR "/tests/gpu/", kBuild = ZR_BUILD_DIR "/";

std::string text_of_file(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

#ifdef ZR_HAS_CUDA
// All of `run all` that needs no GPU, with small sizes.
const char* const kSmallParts = R"(# small
environment
errors
faults
device_lost
collectives 2 65536 shm
optimizer 4096 small
sanitizer

parity tied-bf16-adamw-each-*1-zero2-none-n[2]
steps 1 32 2 16 2 1
offload 1 32 2 16 2 1
largest --tiny 1MiB batch plain zero2+cpu
)";

TEST(GpuRunTest, RunsAllPartsOfAPackageOnTheSimulatedDevice) {
  const zr::test::Scratch scratch;
  const std::string package = scratch.path("package");
  const Outcome packed = shell("ZR_GPU_PYTHON=none " + kGpu + "pack " + package);
  ASSERT_EQ(packed.code, 0) << packed.output;
  EXPECT_THAT(packed.output, ContainsRegex("pack: [0-9]+ MB of programs, plug-ins and libraries"));
  EXPECT_LE(std::stoi(shell("du -sm --exclude=python " + package).output), 45);
  scratch.write("package/parts", kSmallParts);
  const Outcome done =
      shell("TORCH_ROOT=" ZR_TORCH_ROOT " ZR_GPU_DEVICE=sim ZR_SIM_BYTES=268435456 ZR_GPU_LIBRARY=" + kBuild +
            "tests/devices/libzr_sim_device.so ZR_GPU_PLUGINS=" + kBuild + "tests/plugins " + package + "/run all");
  EXPECT_EQ(done.code, 0);
  for (const char* const part :
       {"environment", "errors", "faults", "device_lost", "collectives 2 65536 shm", "optimizer 4096 small",
        "sanitizer", "parity tied-bf16-adamw-each-.1-zero2-none-n.2.", "steps 1 32 2 16 2 1", "offload 1 32 2 16 2 1",
        "largest --tiny 1MiB batch plain zero2\\+cpu"})
    EXPECT_THAT(done.output, ContainsRegex(std::string("== ") + part + ": ok(, [0-9]+ RED)?(, [0-9]+ NOT RUN)? \\("));
  EXPECT_THAT(done.output, ContainsRegex("\n20[0-9-]+, commit [0-9a-f]+(-dirty)?, kernel [^ ]+, [0-9]+ cores"));
  for (const char* const text :
       {"is killed:", "was killed by signal 9", "OutOfMemoryError", "\"row\": \"plain / zeroth, median of 3 rounds\"",
        "bandwidth of all_reduce / of copies by all ranks at once\", \"ratio\": ", "\"mark\": 0.5",
        "forward, backward and offload / the larger of both alone\", \"ratio\": ",
        "\"mark\": 1.15, \"is\": \"at most\"", "n2: cases 1 to 1 of 1: 1 exact, 0 different, ",
        "\n1 cases, 1 exact, 0 different", "largest batch of the best way / plain, 1MiB\", \"ratio\": ",
        "NOT RUN {\"row\": \"compute-sanitizer memcheck\", \"result\": \"not run: compute-sanitizer is not available",
        "NOT RUN {\"row\": \"tokens/s of zeroth / deepspeed2, mark 1.3\", \"result\": \"not run: ",
        "\nrun: 11 parts, 0 FAILED"})
    EXPECT_THAT(done.output, HasSubstr(text));
  EXPECT_THAT(done.output, Not(HasSubstr("PROBLEM")));
}

TEST(GpuRunTest, SLOW_PackRejectsMoreThanTheLimit) {
  const zr::test::Scratch scratch;
  const Outcome packed = shell("ZR_GPU_PYTHON=none " + kGpu + "pack " + scratch.path("package") + " 2");
  EXPECT_EQ(packed.code, 1);
  EXPECT_THAT(packed.output, ContainsRegex("pack: error: [0-9]+ MB, but at most 2 MB"));
  EXPECT_THAT(packed.output, HasSubstr(" ./build/bin/zeroth\n"));
}
#else
TEST(GpuRunTest, RunsAllPartsOfAPackageOnTheSimulatedDevice) {
  GTEST_SKIP() << "there is no nvcc, so there are no plug-ins for CUDA to pack";
}
#endif

// A package whose programs are shell scripts.
class GpuRunOfScriptsTest : public ::testing::Test {
 protected:
  GpuRunOfScriptsTest() {
    scratch_.copy(kGpu + "run", "run");
    fs::permissions(scratch_.path("run"), fs::perms::owner_all);
    scratch_.write("paths", scratch_.path("elsewhere/build") + "\n" + scratch_.path("elsewhere/source") + "\n");
    scratch_.write("commit", "abc\n");
    fs::create_directories(scratch_.path("libtorch/lib"));
    fs::create_directories(scratch_.path("source/tests"));
    fs::create_directories(scratch_.path("build/tests"));
    program("none", "");
  }
  void executable(const std::string& name, const std::string& script) {
    fs::permissions(scratch_.write(name, "#!/bin/sh\n" + script), fs::perms::owner_all);
  }
  void program(const std::string& name, const std::string& script) {
    executable((name.starts_with("tests") ? "build/" : "build/bin/") + name, script);
  }
  Outcome run(const std::string& words, const std::string& variables = "") {
    return shell(variables + " TORCH_ROOT=" + scratch_.path("libtorch") + " " + scratch_.path("run") + " " + words);
  }
  zr::test::Scratch scratch_;
};

TEST_F(GpuRunOfScriptsTest, GoesOnAfterAPartThatFails) {
  program("gpu_step", "echo '{\"row\": \"zeroth: step\", \"reached\": true}'");
  program("tests/parity_matrix", "echo '3 cases, 2 exact, 1 different'; exit 1");
  scratch_.write("parts", "parity x\nerrors\nstep 1 2 3\n");
  const Outcome done = run("all");
  EXPECT_EQ(done.code, 1);
  EXPECT_THAT(done.output, ContainsRegex("PROBLEM: exit code 1 instead of 0\nPROBLEM: .*\n== parity x: FAILED"));
  EXPECT_THAT(done.output, ContainsRegex("PROBLEM: exit code 0 instead of 2\n"));
  EXPECT_THAT(done.output, HasSubstr("== errors: FAILED"));
  EXPECT_THAT(done.output, HasSubstr("== step 1 2 3: ok"));
  EXPECT_THAT(done.output, HasSubstr("\nrun: 3 parts, 2 FAILED; commit abc\n"));
}

TEST_F(GpuRunOfScriptsTest, FailsIfAProgramDoesNotPrintWhatItMust) {
  program("gpu_step", "true");
  EXPECT_EQ(run("step 1 2 3").code, 1);
  program("zeroth", "echo '{\"rank\":0,\"different\":0}'; echo '{\"time\":\"all_gather\"}'");
  EXPECT_THAT(run("collectives 2").output, HasSubstr("PROBLEM: not all of 2 ranks have the reference's bits"));
  EXPECT_EQ(run("collectives 1").code, 0);
  program("zeroth", "echo 'zeroth: error: rank 1 was killed by signal 9'; exit 1");
  const Outcome lost = run("device_lost");
  EXPECT_EQ(lost.code, 1);
  EXPECT_THAT(lost.output, HasSubstr("PROBLEM: rank 1 reports 0 errors instead of one"));
}

TEST_F(GpuRunOfScriptsTest, ShowsRowsBelowTheirMarkInRedAndRowsThatDidNotRun) {
  program("gpu_step",
          "echo '{\"row\": \"zeroth: step\", \"tokens_per_s\": 100}'; echo '{\"row\": \"r\", \"mark\": 0.97, "
          "\"reached\": false}'");
  executable("path/python3", "echo no GPU; exit 1");
  const Outcome done = run("offload 1 2 3", "PATH=" + scratch_.path("path") + ":$PATH");
  EXPECT_EQ(done.code, 1);
  EXPECT_THAT(done.output, HasSubstr("fsdp2, mark 1.3\", \"result\": \"not run: no GPU\"}"));
  EXPECT_THAT(done.output, HasSubstr("\nRED {\"row\": \"r\", \"mark\": 0.97"));
  EXPECT_THAT(done.output, HasSubstr("NOT RUN {\"row\": \"tokens/s of zeroth / deepspeed2, mark 1.3\", "
                                     "\"result\": \"not run: DeepSpeed is not in the package (make peers)\"}"));
  EXPECT_THAT(run("step 1 2 3").output, HasSubstr("== step 1 2 3: ok, 1 RED ("));
}

TEST_F(GpuRunOfScriptsTest, ComparesWithPeers) {
  program("gpu_step", "echo '{\"row\": \"zeroth: step\", \"tokens_per_s\": 140}'; echo '\"reached\": true'");
  fs::create_directories(scratch_.path("python/deepspeed"));
  executable("path/python3",
             "echo \"{\\\"row\\\": \\\"$3: step\\\", \\\"tokens_per_s\\\": 10$(printf %s $3 | wc -c)}\"");
  const Outcome done = run("offload 1 2 3", "PATH=" + scratch_.path("path") + ":$PATH");
  EXPECT_EQ(done.code, 0) << done.output;
  // The scripts' rates: 10 and the length of the name.
  EXPECT_THAT(done.output,
              HasSubstr("\nRED {\"row\": \"tokens/s of zeroth / deepspeed2\", \"zeroth\": 140, \"deepspeed2\": "
                        "1010, \"ratio\": 0.139, \"mark\": 1.3, \"reached\": false}"));
  EXPECT_THAT(done.output,
              HasSubstr("\n{\"row\": \"tokens/s of zeroth / fsdp2\", \"zeroth\": 140, \"fsdp2\": 105, \"ratio\": "
                        "1.333, \"mark\": 1.3"));
}

TEST_F(GpuRunOfScriptsTest, EndsAPartAtItsLimitAndKeepsItsOutput) {
  program("gpu_optimizer", "echo begun; sleep 30");
  const Outcome done = run("optimizer", "ZR_GPU_LIMIT=1");
  EXPECT_EQ(done.code, 1);
  EXPECT_THAT(done.output, HasSubstr("\nbegun\n"));
  EXPECT_THAT(done.output, HasSubstr("\n== optimizer: FAILED: cut off after 1 s"));
}

TEST_F(GpuRunOfScriptsTest, RunsTheSanitizerOnTheKernels) {
  program("none", "");
  const auto tool = [&](const std::string& text) {
    executable("path/compute-sanitizer", text);
    return run("sanitizer", "PATH=" + scratch_.path("path") + ":$PATH");
  };
  const Outcome clean = tool("echo \"$@\"; echo ERROR SUMMARY: 0 errors");
  EXPECT_EQ(clean.code, 0) << clean.output;
  EXPECT_THAT(clean.output, ContainsRegex("--tool memcheck .*gpu_optimizer .* cuda .*/libtorch_cuda.so 0 small\n"));
  EXPECT_THAT(clean.output, ContainsRegex("--tool racecheck .*gpu_collectives cuda 1048576 shm "));
  const Outcome wrong = tool("echo ERROR SUMMARY: 1 error; exit 9");
  EXPECT_EQ(wrong.code, 1);
  EXPECT_THAT(wrong.output, HasSubstr("PROBLEM: exit code 9 instead of 0"));
  const Outcome forbidden = tool("echo Error: the debugger interface is not supported; exit 1");
  EXPECT_EQ(forbidden.code, 0);
  EXPECT_THAT(forbidden.output, HasSubstr("sanitizer: ok, 4 NOT RUN"));
  EXPECT_THAT(tool("echo ========= COMPUTE-SANITIZER; exit 124").output,
              AllOf(HasSubstr("it takes more than 120 s"), HasSubstr("sanitizer: ok, 4 NOT RUN")));
  EXPECT_THAT(tool("echo ========= Invalid __global__ read of size 4; exit 124").output,
              HasSubstr("PROBLEM: exit code 124 instead of 0"));
}

TEST_F(GpuRunOfScriptsTest, RejectsUnknownParts) {
  const Outcome done = run("nonsense");
  EXPECT_EQ(done.code, 2);
  EXPECT_THAT(done.output, HasSubstr("usage: run PART [WORD ...]; parts: environment errors"));
}

TEST_F(GpuRunOfScriptsTest, RunsTheFirstPartsForAShortLease) {
  program("gpu_step", "echo '{\"row\": \"zeroth: step\", \"reached\": true}'");
  scratch_.write("parts", "# a\nstep 1\n# b\nstep 2\n# later\nstep 3\n");
  const Outcome first = run("first");
  EXPECT_EQ(first.code, 0) << first.output;
  EXPECT_THAT(first.output, HasSubstr("== step 2: ok"));
  EXPECT_THAT(first.output, Not(HasSubstr("step 3")));
  EXPECT_THAT(first.output, HasSubstr("\nrun: 2 parts, 0 FAILED"));
  EXPECT_THAT(run("all").output, HasSubstr("\nrun: 3 parts, 0 FAILED"));
}

// The program prints what libtorch's CUDA does; its device is visible unless the variable hides it.
TEST_F(GpuRunOfScriptsTest, ExpectsOneLineIfCudaVisibleDevicesHidesTheDevice) {
  const auto errors = [&](const std::string& hidden) {
    program("gpu_step",
            "[ $1 = nonsense ] && echo 'zeroth: error: job.device = \"nonsense\": this libtorch does not have "
            "a backend' && exit 3\n[ \"${CUDA_VISIBLE_DEVICES-all}\" ] && echo 'zeroth: error: job.device = "
            "\"cuda:99\": ... numbered from 0' && exit 2\n" +
                hidden);
    return run("errors", "env -u CUDA_VISIBLE_DEVICES");
  };
  const std::string line =
      "echo 'zeroth: error: job.device = \"cuda\": the device cannot be used: No CUDA GPUs are available; check it'\n";
  const Outcome clear = errors(line + "exit 3");
  EXPECT_EQ(clear.code, 0) << clear.output;
  EXPECT_THAT(clear.output, HasSubstr("No CUDA GPUs are available"));
  EXPECT_THAT(errors(line + "exit 1").output, HasSubstr("PROBLEM: exit code 1 instead of 3\n"));
  EXPECT_THAT(errors(line + line + "exit 3").output, HasSubstr("PROBLEM: without visible devices, the output has 2 "));
  EXPECT_THAT(errors("exit 3").output, HasSubstr("PROBLEM: without visible devices, the output has 0 "));
}

TEST(GpuMakeTest, NamesTheMissingCompilerBeforeItBuilds) {
  const zr::test::Scratch scratch;
  scratch.copy(ZR_SOURCE_DIR "/Makefile");
  const std::string make = "env -u MAKEFLAGS -u CUDACXX -u CUDA_PATH make -C " + scratch.folder().string() + " ";
  const Outcome done = shell(make + "NVCC= gpu");
  EXPECT_EQ(done.code, 2);
  EXPECT_THAT(done.output,
              HasSubstr("gpu: error: the compiler for CUDA, nvcc, was not found\n  remedy: .ci/setup cuda; "));
  EXPECT_THAT(done.output, Not(HasSubstr("JOBS=1")));
  const std::string print = "-s --eval='print-nvcc: ; @echo $(NVCC)' print-nvcc";
  const std::string unpacked = "build/deps/cuda/nvidia/cu13/bin/nvcc";
  scratch.write(unpacked, "");
  EXPECT_THAT(shell(make + print).output, HasSubstr(unpacked + "\n"));
  scratch.write("build/CMakeCache.txt", "CMAKE_CUDA_COMPILER:FILEPATH=" + scratch.write("own/nvcc", "") + "\n");
  EXPECT_THAT(shell(make + print).output, HasSubstr(scratch.path("own/nvcc") + "\n"));
  EXPECT_EQ(shell(make + "nvcc").code, 0);
}

TEST(GpuPartsTest, EachHasADescriptionWithItsTime) {
  const std::regex time(R"(\. (\d+ to )?\d+ (s|min)( each)?(\.|$))");
  const std::string readme = text_of_file(kGpu + "README.md");
  std::istringstream parts(text_of_file(kGpu + "parts"));
  std::string description;
  bool in_comment = false;
  int number = 0, named = 0;
  for (std::string line; std::getline(parts, line);) {
    const bool comment = line.starts_with("#");
    if (comment && line != "# later") description = in_comment ? description + line.substr(1) : line;
    in_comment = comment && line != "# later";
    if (comment || line.empty()) continue;
    ++number;
    EXPECT_TRUE(std::regex_search(description, time)) << line << ": " << description;
    named += readme.find("`DIR/run " + line + "`") != readme.npos;
  }
  EXPECT_EQ(number, 34);
  EXPECT_EQ(named, 1) << "the README names the part that follows `run first`";
}

}  // namespace
