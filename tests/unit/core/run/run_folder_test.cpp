// The run folder on disk: numbered runs, links to the newest one, rows that a resumed run copies, and the lock.
#include "run/run_folder.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

namespace fs = std::filesystem;

using namespace host;
using Paths = std::vector<std::string>;

class RunFolderTest : public ::testing::Test {
 protected:
  static config::JobConfig config_with(const std::string& runs) {
    return config::Document::parse("", "job.toml", {"job.name=a", "job.runs=" + runs}).check({}, 1);
  }
  config::JobConfig config() const { return config_with(scratch_.path("runs")); }
  std::string path(const std::string& name) const { return scratch_.path("runs/a/" + name); }
  std::string text_of(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(path(name), std::ios::binary).rdbuf();
    return text.str();
  }
  std::string link_of(const std::string& name) const {
    return fs::is_symlink(path(name)) ? fs::read_symlink(path(name)).string() : "not a link";
  }
  const test::Scratch scratch_;
};

TEST_F(RunFolderTest, PathHasTheNamesOfJobAndEngine) {
  EXPECT_EQ(run::run_folder(config(), ""), scratch_.path("runs/a"));
  EXPECT_EQ(run::run_folder(config(), "generator"), scratch_.path("runs/a/generator"));
  EXPECT_EQ(run::run_folder(config_with("here"), ""), fs::current_path().string() + "/here/a");
}

TEST_F(RunFolderTest, ListsRunsNewestFirst) {
  for (const char* name : {"2", "10", "9", "01", "0", "-3", "4x", "refresh"}) fs::create_directories(path(name));
  fs::create_symlink("latest/summary.json", path("summary.json"));
  EXPECT_EQ(run::runs_in(scratch_.path("runs/a")), (Paths{path("10"), path("9"), path("2")}));
}

TEST_F(RunFolderTest, BeginsANumberedRunAndLinksToIt) {
  run::RunFolder folder(config(), "");
  EXPECT_FALSE(fs::exists(path("1"))) << "no run has been accepted";
  folder.begin("[train]\n", "row 1\n");
  EXPECT_EQ(folder.run(), path("1"));
  folder.append("row 2\n");
  folder.append("row 3\n");
  folder.summarise("{\"steps\": 3}\n");
  EXPECT_EQ(text_of("1/config.toml"), "[train]\n");
  EXPECT_EQ(text_of("1/metrics.jsonl"), "row 1\nrow 2\nrow 3\n");
  EXPECT_EQ(text_of("1/summary.json"), "{\"steps\": 3}\n");
  EXPECT_EQ(link_of("latest"), "1");
  for (const std::string name : {"config.toml", "metrics.jsonl", "summary.json"})
    EXPECT_EQ(link_of(name), "latest/" + name);
}

TEST_F(RunFolderTest, NumbersARunAfterTheHighestNumber) {
  run::RunFolder(config(), "").begin("first", "");
  fs::rename(path("1"), path("41"));
  run::RunFolder folder(config(), "");
  folder.begin("second", "");
  EXPECT_EQ(folder.run(), path("42"));
  EXPECT_EQ(link_of("latest"), "42");
  EXPECT_EQ(text_of("config.toml"), "second");
  EXPECT_EQ(text_of("41/config.toml"), "first");
}

TEST_F(RunFolderTest, NamedEngineHasItsOwnRuns) {
  run::RunFolder unnamed(config(), ""), named(config(), "generator");
  unnamed.begin("unnamed", "");
  named.begin("named", "");
  EXPECT_EQ(unnamed.run(), path("1"));
  EXPECT_EQ(named.run(), path("generator/1"));
  EXPECT_EQ(text_of("1/config.toml"), "unnamed");
  EXPECT_EQ(text_of("generator/1/config.toml"), "named");
}

TEST_F(RunFolderTest, ReturnsTheRowsOfTheNewestRunUpToAStep) {
  EXPECT_EQ(run::RunFolder(config(), "").rows_up_to(9), "") << "there is no run";
  run::RunFolder(config(), "").begin("", "{\"step\": 1, \"loss\": 9}\n");
  run::RunFolder(config(), "")
      .begin("",
             "{\"step\": 1, \"loss\": 0.5}\n{\"step\": 2, \"loss\": null}\n{\"step\": 2, \"val_loss\": 3}\n"
             "[2]\n{\"loss\": 4}\n{\"step\": \"2\"}\n{\"step\": 3, \"loss\": 1}\n{\"step\": 2, \"lo");
  const run::RunFolder folder(config(), "");
  EXPECT_EQ(folder.rows_up_to(0), "");
  EXPECT_EQ(folder.rows_up_to(1), "{\"step\": 1, \"loss\": 0.5}\n");
  EXPECT_EQ(folder.rows_up_to(2),
            "{\"step\": 1, \"loss\": 0.5}\n{\"step\": 2, \"loss\": null}\n{\"step\": 2, \"val_loss\": 3}\n");
}

TEST_F(RunFolderTest, FindsTheSummaryOfAStepInTheNewestRun) {
  run::RunFolder folder(config(), "");
  EXPECT_FALSE(folder.has_summary_of(0)) << "there is no run";
  folder.begin("", "");
  EXPECT_FALSE(folder.has_summary_of(7)) << "the run has no summary.json";
  folder.summarise("{\"steps\": 7}");
  EXPECT_TRUE(folder.has_summary_of(7));
  EXPECT_FALSE(folder.has_summary_of(6));
  folder.summarise("{\"steps\": \"7\"}");
  EXPECT_FALSE(folder.has_summary_of(7));
  folder.summarise("{\"steps\": 7");
  EXPECT_FALSE(folder.has_summary_of(7)) << "the file is truncated";
}

TEST_F(RunFolderTest, ReplacesNothingByALink) {
  const auto refused = [&](const std::string& name) {
    run::RunFolder folder(config(), "");
    EXPECT_EQ(failure_of([&] { folder.begin("new", ""); }),
              scratch_.path("runs/a") + "/" + name +
                  " is not a link, but a run folder has one there; move it to another folder, or set job.name or "
                  "job.runs to another folder");
    EXPECT_FALSE(fs::exists(path("1")));
    fs::remove_all(path(name));
  };
  for (const std::string name : {"config.toml", "metrics.jsonl", "summary.json", "latest"}) {
    scratch_.write("runs/a/" + name, "of the user");
    EXPECT_EQ(text_of(name), "of the user");
    refused(name);
    fs::create_directories(path(name) + "/inside");
    refused(name);
  }
  run::RunFolder(config(), "").begin("new", "");
  EXPECT_TRUE(fs::exists(path("1")));
}

TEST_F(RunFolderTest, ReadsNoRunThroughALinkThatIsNotARun) {
  scratch_.write("elsewhere/summary.json", "{\"steps\": 5}");
  scratch_.write("elsewhere/metrics.jsonl", "{\"step\": 5}\n");
  const run::RunFolder folder(config(), "");
  fs::create_symlink(scratch_.path("elsewhere"), path("latest"));
  EXPECT_FALSE(folder.has_summary_of(5));
  EXPECT_EQ(folder.rows_up_to(5), "");
}

TEST_F(RunFolderTest, RejectsAFolderThatIsInUse) {
  char host[256] = {};
  ASSERT_EQ(::gethostname(host, sizeof host - 1), 0);
  const std::string holder = "process " + std::to_string(::getpid()) + " on " + host;
  {
    const run::RunFolder first(config(), "");
    EXPECT_EQ(failure_of([&] { const run::RunFolder second(config(), ""); }),
              "the run folder " + scratch_.path("runs/a") + " is in use by another job (" + holder +
                  "); set job.name or job.runs to another folder, or wait for that job to end");
    EXPECT_EQ(failure_of([&] { const run::RunFolder other(config(), "generator"); }), "");
  }
  EXPECT_EQ(failure_of([&] { const run::RunFolder again(config(), ""); }), "");
}

}  // namespace
}  // namespace zr::testing
