#include "cli/new_command.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "base/error.hpp"
#include "support/scratch.hpp"

namespace zr::host::cli {

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

std::string text_of(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

// An installation with the templates, and without the example's program.
class NewCommandTest : public ::testing::Test {
 protected:
  NewCommandTest() {
    fs::create_directories(prefix() / "share/zeroth");
    fs::create_directory_symlink(ZR_SOURCE_DIR "/sdk/template", prefix() / "share/zeroth/template");
    fs::create_directory(prefix() / "bin");
  }
  fs::path prefix() const { return scratch_.folder() / "a prefix"; }
  std::string project() const { return scratch_.path("project"); }
  std::vector<std::string> write(const std::string& role, const std::string& id = "acme.mine", bool in_c = false) {
    return write_project({role, id, project(), in_c}, prefix() / "bin");
  }
  std::string error(const std::string& role, const std::string& id = "acme.mine") {
    try {
      write(role, id);
    } catch (const Error& failure) {
      return failure.what();
    }
    return "no error";
  }
  const test::Scratch scratch_;
};

TEST_F(NewCommandTest, WritesFilesWithoutPlaceholders) {
  static const std::regex placeholder("@[A-Z_]+@");
  for (const char* role : {"strategy", "communicator", "optimizer", "offload"})
    for (const bool in_c : {false, true}) {
      const std::string source = in_c ? "plugin.c" : "plugin.cpp";
      ASSERT_THAT(write(role, "acme.mine", in_c),
                  ElementsAre(".gitignore", "CMakeLists.txt", "README.md", "job.toml", source));
      for (const auto& entry : fs::directory_iterator(project())) {
        const std::string text = text_of(entry.path());
        EXPECT_FALSE(std::regex_search(text, placeholder)) << role << " " << entry.path() << "\n" << text;
        EXPECT_FALSE(text.empty()) << entry.path();
      }
      EXPECT_THAT(text_of(project() + "/job.toml"), HasSubstr("acme.mine"));
      fs::remove_all(project());
    }
}

TEST_F(NewCommandTest, FillsInTheInstallationAndTheVendor) {
  write("offload");
  const std::string readme = text_of(project() + "/README.md");
  EXPECT_THAT(readme, HasSubstr("-DCMAKE_PREFIX_PATH='" + prefix().string() + "'"));
  EXPECT_THAT(readme, HasSubstr("zeroth/examples/quickstart -B model"));
  EXPECT_THAT(readme, Not(HasSubstr("--component sdk")));
  EXPECT_THAT(text_of(project() + "/job.toml"), HasSubstr("program = \"model/quickstart\""));
  EXPECT_THAT(text_of(project() + "/plugin.cpp"), HasSubstr("ZR_OFFLOAD(Plugin, \"acme.mine\", \"acme\", \"0.1.0\");"));
}

TEST_F(NewCommandTest, UsesTheProgramBesideZeroth) {
  std::ofstream(prefix() / "bin/quickstart") << "a program";
  write("offload", "mine");
  EXPECT_THAT(text_of(project() + "/README.md"), Not(HasSubstr("-B model")));
  EXPECT_THAT(text_of(project() + "/job.toml"), HasSubstr("program = \"quickstart\""));
  EXPECT_THAT(text_of(project() + "/plugin.cpp"), HasSubstr("ZR_OFFLOAD(Plugin, \"mine\", \"local\", \"0.1.0\");"));
}

TEST_F(NewCommandTest, InstallsTheSdkOfABuildTreeFirst) {
  std::ofstream(prefix() / "CMakeCache.txt") << "";
  write("strategy");
  EXPECT_THAT(text_of(project() + "/README.md"),
              HasSubstr("    cmake --install '" + prefix().string() + "' --component sdk --prefix sdk\n"));
}

TEST_F(NewCommandTest, KeepsFilesThatExist) {
  fs::create_directory(project());
  std::ofstream(project() + "/plugin.cpp") << "mine";
  EXPECT_THAT(error("optimizer"), HasSubstr("is not empty, and no file in it is replaced"));
  EXPECT_EQ(text_of(project() + "/plugin.cpp"), "mine");
  EXPECT_FALSE(fs::exists(project() + "/README.md"));
}

// A limit of 100 bytes per file stands for a full disk: .gitignore is written, CMakeLists.txt is not.
TEST_F(NewCommandTest, RemovesItsFilesAfterAFailure) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{100, before.rlim_max};
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = error("optimizer");
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  EXPECT_THAT(text, HasSubstr("zeroth new: " + project() + "/CMakeLists.txt: "));
  EXPECT_THAT(text, HasSubstr("File too large"));
  EXPECT_FALSE(fs::exists(project()));
}

TEST_F(NewCommandTest, NamesTheCommandThatInstallsMissingTemplates) {
  fs::remove(prefix() / "share/zeroth/template");
  EXPECT_THAT(error("optimizer"), HasSubstr("install the SDK there: cmake --install BUILD --component sdk --prefix '" +
                                            prefix().string() + "'"));
  EXPECT_FALSE(fs::exists(project()));
}

}  // namespace

}  // namespace zr::host::cli
