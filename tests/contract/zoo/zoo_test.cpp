// The libraries of the zoo, plug-ins of ABI 0.9 that several compilers built, train the same bits as the plug-ins of
// this build: with the host of this version, and with a later one (tests/contract/evolution) under AddressSanitizer.
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>

#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace zr::testing {
namespace {

namespace fs = std::filesystem;
const std::string kZoo = ZR_SOURCE_DIR "/tests/contract/zoo";

class ZooTest : public ::testing::TestWithParam<const char*> {
 protected:
  // A copy, which only its owner can change: the host rejects others, and git does not store these permissions.
  ZooTest() : plugins_((scratch_.folder() / "plugins").string()) {
    fs::create_directories(plugins_);
    for (const auto& entry : fs::directory_iterator(kZoo)) {
      if (entry.path().extension() != ".so") continue;
      const fs::path copy = fs::path(plugins_) / entry.path().filename();
      fs::copy_file(entry.path(), copy);
      fs::permissions(copy, fs::perms::owner_read | fs::perms::owner_write);
    }
    fs::permissions(plugins_, fs::perms::owner_all);
  }
  // What evolution_job prints: the strategy, a hash of weights and states, the norm of the last gradient.
  static std::string trained(const std::string& program, const std::string& plugins) {
    const Outcome outcome =
        shell("ZR_PROGRESS=off " ZR_BUILD_DIR "/tests/" + program + " " + plugins + " " + GetParam());
    EXPECT_EQ(outcome.code, 0) << outcome.output;
    return outcome.output;
  }
  test::Scratch scratch_;
  std::string plugins_;
};

TEST_P(ZooTest, TrainsTheBitsOfThisBuild) {
  const std::string expected = trained("evolution_job", ZR_BUILD_DIR "/plugins");
  EXPECT_TRUE(std::regex_match(expected, std::regex("zero[13] [0-9a-f]{16} [0-9.]+\n"))) << expected;
  EXPECT_EQ(trained("evolution_job", plugins_), expected);
}

TEST_P(ZooTest, SLOW_TrainsTheSameBitsWithALaterHost) {
  EXPECT_EQ(trained("evolution_job_later", plugins_), trained("evolution_job", ZR_BUILD_DIR "/plugins"));
}

INSTANTIATE_TEST_SUITE_P(Strategies, ZooTest, ::testing::Values("zero1", "zero3"),
                         [](const auto& info) { return std::string(info.param); });

// What the README of the zoo says about a library.
struct Library {
  const char* name;
  const char* compiler;  // in the section .comment
  bool shared_libstdcxx;
  const char* glibc;  // the newest version that it may need
};
class ZooLibraryTest : public ::testing::TestWithParam<Library> {};

TEST_P(ZooLibraryTest, IsWhatTheReadmeSays) {
  const std::string file = kZoo + "/" + GetParam().name;
  EXPECT_LT(fs::file_size(file), 800u << 10);
  const std::string sections = shell("readelf -WS " + file).output, needed = shell("readelf -Wd " + file).output;
  EXPECT_EQ(sections.find(".symtab"), std::string::npos);
  EXPECT_EQ(sections.find(".debug"), std::string::npos);
  EXPECT_EQ(needed.find("libstdc++") != std::string::npos, GetParam().shared_libstdcxx) << needed;
  EXPECT_NE(shell("readelf -p .comment " + file).output.find(GetParam().compiler), std::string::npos);
  for (const std::string& name : shell("nm -D --defined-only " + file + " | awk '{print $3}'").lines())
    EXPECT_TRUE(std::regex_match(name, std::regex("zr_module_v1|zr_tag_\\w+"))) << name;
  const std::vector<std::string> versions =
      shell("objdump -T " + file + " | grep -o 'GLIBC_[0-9.]*' | cut -c7- | sort -uV").lines();
  ASSERT_FALSE(versions.empty());
  EXPECT_EQ(shell("printf '%s\\n' " + versions.back() + " " + GetParam().glibc + " | sort -V | tail -1").lines().at(0),
            GetParam().glibc);
}

INSTANTIATE_TEST_SUITE_P(Libraries, ZooLibraryTest,
                         ::testing::Values(Library{"zr_optimizer_sgd.so", "GCC: (Debian 12", false, "2.36"},
                                           Library{"zr_strategy_zero1.so", "GCC: (Debian 12", true, "2.36"},
                                           Library{"zr_strategy_zero3.so", "Debian clang version 14", true, "2.36"},
                                           Library{"zr_offload_cpu.so", "GCC: (Debian 12", false, "2.36"},
                                           Library{"zr_communicator_shm.so", "clang version", false, "2.31"}),
                         [](const auto& info) { return fs::path(info.param.name).stem().string(); });

TEST(ZooLibraryTest, NeverChanges) {
  const Outcome outcome = shell("cd " + kZoo + " && sha256sum --check --strict --quiet SHA256SUMS");
  EXPECT_EQ(outcome.code, 0) << outcome.output << "remedy: git restore tests/contract/zoo";
  EXPECT_EQ(shell("sha256sum < " + kZoo + "/SHA256SUMS").lines().at(0),
            "2202576dbdc6802e8d56a636ce7cf88aa706bc3d5bdd68e8338997383231a0c1  -");
}

}  // namespace
}  // namespace zr::testing
