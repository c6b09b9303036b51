// One rule for all keys that are paths: in a file relative to its folder, elsewhere to the working directory.
#include <gtest/gtest.h>

#include <filesystem>

#include "config/config.hpp"
#include "config/foreign_keys.hpp"
#include "config/key_json.hpp"
#include "config/key_reader.hpp"
#include "support/environment_variable.hpp"
#include "support/said_by.hpp"
#include "support/scratch.hpp"

namespace zr::host::config {
namespace {

namespace fs = std::filesystem;

// A string key of a plug-in, as its library declares it.
zr_key plugin_key(const char* name) {
  return {sizeof(zr_key), ZR_KEY_STRING, 0, 0, name, "\"\"", -1, 1, nullptr, "a text"};
}

class PathValueTest : public ::testing::Test {
 protected:
  void TearDown() override { fs::current_path(before_); }
  // The configuration of conf/job.toml, with the working directory `work`.
  JobConfig load(const std::string& toml, const std::vector<std::string>& overrides = {}) {
    scratch_.write("conf/job.toml", toml);
    fs::create_directories(folder_ / "work");
    fs::current_path(folder_ / "work");
    ConfigKey data{"data", "text", ZR_KEY_STRING, "\"\"", "the program's data"};
    data.path_kind = PathKind::path;
    std::vector<ConfigKey> keys = keys_from_json(to_json({data}) + "\n", "app");  // as `zeroth` learns it
    const zr_key path = plugin_key("path"), library = plugin_key("library"), word = plugin_key("word");
    const zr_key* const declared[] = {&path, &library, &word};
    for (ConfigKey& key : keys_of(declared, 3, "offload.disk")) keys.push_back(key);
    return Document::load("../conf/job.toml", overrides).check(keys, 1);
  }
  std::string in(const std::string& path) const { return (folder_ / path).string(); }
  static std::string text(const JobConfig& config, const std::string& key) { return KeyReader(config).text(key); }

  test::Scratch scratch_;
  const fs::path folder_ = fs::canonical(scratch_.folder()), before_ = fs::current_path();
};

TEST_F(PathValueTest, ValuesOfAFileAreRelativeToItsFolder) {
  const JobConfig config = load(
      "offload.disk = { path = 'a:/b:c', library = 'libx.so.2', word = 'a/b' }\ndata.text = '../data/x.txt'\n"
      "[job]\ndevice = 'npu'\ndevice_library = 'lib/x.so'\nruns = 'out'\n"
      "[checkpoint]\ndir = 'ckpt'\ninit = 'weights.safetensors'\n");
  EXPECT_EQ(config.checkpoint().dir.value, in("conf/ckpt"));
  EXPECT_EQ(config.checkpoint().dir.written, "\"ckpt\"");
  EXPECT_EQ(config.checkpoint().dir.given_path.text, "ckpt");
  EXPECT_EQ(config.checkpoint().init.value, in("conf/weights.safetensors"));
  EXPECT_EQ(config.job().runs.value, in("conf/out"));
  EXPECT_EQ(config.job().device_library.value, in("conf/lib/x.so"));
  EXPECT_EQ(text(config, "data.text"), in("data/x.txt"));
  EXPECT_EQ(text(config, "offload.disk.path"), in("conf/a") + ":/b:" + in("conf/c"));
  EXPECT_EQ(text(config, "offload.disk.library"), "libx.so.2");  // a name, which the dynamic loader searches
  EXPECT_EQ(text(config, "offload.disk.word"), "a/b");
}

TEST_F(PathValueTest, ValuesOfTheCommandLineAreRelativeToTheWorkingDirectory) {
  const JobConfig config = load("checkpoint.dir = 'ckpt'\n", {"checkpoint.dir=c", "job.runs=../r", "data.text=d",
                                                              "offload.disk.path=a:b", "offload.disk.library=./x.so"});
  EXPECT_EQ(config.checkpoint().dir.value, in("work/c"));
  EXPECT_EQ(config.job().runs.value, in("r"));
  EXPECT_EQ(text(config, "data.text"), in("work/d"));
  EXPECT_EQ(text(config, "offload.disk.path"), in("work/a") + ":" + in("work/b"));
  EXPECT_EQ(text(config, "offload.disk.library"), in("work/x.so"));
}

TEST_F(PathValueTest, DefaultsAreRelativeToTheWorkingDirectory) {
  const JobConfig config = load("");
  EXPECT_EQ(config.job().runs.value, in("work/runs"));
  EXPECT_EQ(config.checkpoint().dir.value, "");
}

TEST_F(PathValueTest, ConfigurationOfAProgramIsRelativeToTheWorkingDirectory) {
  fs::current_path(folder_);
  const JobConfig config =
      Document::parse("job.runs = 'r'\n", "zr::Configuration", {}, {"checkpoint.dir=\"c\""}).check({}, 1);
  EXPECT_EQ(config.job().runs.value, in("r"));
  EXPECT_EQ(config.checkpoint().dir.value, in("c"));
}

TEST_F(PathValueTest, TildeExpandsEverywhere) {
  const test::EnvironmentVariable home("HOME");
  home.set("/home/me");
  const JobConfig config = load("checkpoint.dir = '~/ckpt'\noffload.disk.path = '/a:~/b'\n", {"job.runs=~/runs"});
  EXPECT_EQ(config.checkpoint().dir.value, "/home/me/ckpt");
  EXPECT_EQ(text(config, "offload.disk.path"), "/a:/home/me/b");
  EXPECT_EQ(config.job().runs.value, "/home/me/runs");
  EXPECT_EQ(test::said_by([&] { load("checkpoint.dir = '~nobody-here/c'\n"); }),
            "../conf/job.toml:1:18: checkpoint.dir: \"~nobody-here/c\": there is no user 'nobody-here' with a home "
            "folder; write an absolute path, or ./~nobody-here/c for a file of that name");
}

TEST_F(PathValueTest, FilesOfPluginsAndProgramsHaveTheSameRule) {
  scratch_.write("conf/app", "");
  const std::string toml = "optimizer = './lion.so'\njob.program = 'app'\noffload.optimizer = 'tiers/x.so'\n";
  JobConfig config = load(toml);
  EXPECT_EQ(text(config, "optimizer"), in("conf/lion.so"));
  EXPECT_EQ(text(config, "strategy"), "zero0");
  EXPECT_EQ(config.job().program.value, in("conf/app"));
  EXPECT_EQ(config.offload().optimizer->text, in("conf/tiers/x.so"));
  config = load(toml, {"optimizer=./lion.so", "job.program=bin/app"});
  EXPECT_EQ(text(config, "optimizer"), in("work/lion.so"));
  EXPECT_EQ(config.job().program.value, in("work/bin/app"));
  EXPECT_EQ(load("job.program = 'of_bin'\n").job().program.value, "of_bin");  // searched beside `zeroth` too
}

TEST_F(PathValueTest, EffectiveConfigurationGivesTheSamePathsFromAnyFolder) {
  const std::string toml = load("checkpoint.dir = 'ckpt'\njob.runs = 'out'\ndata.text = 'x'\n").to_toml();
  scratch_.write("conf/job.toml", toml);
  const std::string elsewhere = scratch_.write("run/1/config.toml", toml);
  ConfigKey data{"data", "text", ZR_KEY_STRING, "\"\"", "the program's data"};
  data.path_kind = PathKind::path;
  ConfigKey path{"offload.disk", "path", ZR_KEY_STRING, "\"\"", "a text"}, library = path, word = path;
  library.name = "library", word.name = "word";
  const JobConfig again = Document::load(elsewhere, {}).check({data, path, library, word}, 1);
  EXPECT_EQ(again.checkpoint().dir.value, in("conf/ckpt"));
  EXPECT_EQ(again.job().runs.value, in("conf/out"));
  EXPECT_EQ(text(again, "data.text"), in("conf/x"));
}

TEST(GroupOverrideTest, SetsKeysOfAGroupByNumber) {
  const std::string toml = "[[optimizer.groups]]\nmatch = 'a'\nlr_scale = 0.5\n[[optimizer.groups]]\nmatch = 'b'\n";
  const JobConfig config = Document::parse(toml, "job.toml",
                                           {"optimizer.groups.1.lr_scale=0.25", "optimizer.groups.2.match=*.bias",
                                            "optimizer.groups.2.lr_scale=2"})
                               .check({}, 1);
  ASSERT_EQ(config.groups().size(), 3u);
  EXPECT_EQ(config.groups()[0].lr_scale, 0.5);
  EXPECT_EQ(config.groups()[1].lr_scale, 0.25);
  EXPECT_EQ(config.groups()[2].lr_scale, 2);
  EXPECT_EQ(config.groups()[2].match, std::vector<std::string>{"*.bias"});
  EXPECT_EQ(config.groups()[2].origin.text(), "command line");
  EXPECT_EQ(test::said_by([&] { Document::parse(toml, "job.toml", {"optimizer.groups.3.lr_scale=1"}); }),
            "command line: optimizer.groups.3.lr_scale: '3' is not the number of a group; there are 2 groups, and 0 is "
            "the first");
  EXPECT_EQ(test::said_by([&] { Document::parse(toml, "job.toml", {"optimizer.groups.lr_scale=1"}); }),
            "command line: optimizer.groups.lr_scale: a key of a group is optimizer.groups.NUMBER.KEY; 0 is the first "
            "group");
}

TEST(ForeignKeysTest, NamesOfOtherSystemsGetTheirRemedy) {
  const auto message = [](const std::string& assignment) {
    return test::said_by([&] { Document::parse("", "job.toml", {assignment}).check({}, 1); });
  };
  EXPECT_EQ(
      message("train.epochs=3"),
      "command line: unknown key 'train.epochs'; a job counts optimizer steps: set train.steps = samples x epochs "
      "/ train.global_batch");
  EXPECT_EQ(message("train.batch_size=8"),
            "command line: unknown key 'train.batch_size'; set train.micro_batch (samples per backward and rank) or "
            "train.global_batch (samples per step)");
  EXPECT_EQ(message("train.precision=bf16"),
            "command line: unknown key 'train.precision'; set train.dtype = \"fp32\", \"bf16\" or \"fp16\"");
  EXPECT_EQ(message("optimizer.betas=[0.9, 0.95]"),
            "command line: unknown key 'optimizer.betas'; set beta1 and beta2 in the table of the optimizer: "
            "[optimizer.adamw]");
  EXPECT_EQ(message("bf16.enabled=true"),
            "command line: unknown table 'bf16'; set train.dtype = \"fp32\", \"bf16\" or \"fp16\"");
}

TEST(ForeignKeysTest, RemediesNameKeysThatExist) {
  std::set<std::string> known{"strategy",
                              "communicator",
                              "optimizer.adamw",
                              "optimizer.groups",
                              "schedule.cosine",
                              "strategy.zero2",
                              "strategy.zero3.prefetch_bytes",
                              "strategy.zero3.persistence_threshold",
                              "strategy.zero3.max_live_bytes",
                              "strategy.zero3.max_reuse_bytes",
                              "offload.nvme.path"};
  for (const ConfigKey& key : host_keys()) known.insert(key.path());
  for (const ForeignKey& key : foreign_keys()) {
    const std::string text(key.remedy);
    bool found = false;
    for (const std::string& path : known) found |= text.find(path) != text.npos;
    EXPECT_TRUE(found) << text;
  }
}

}  // namespace
}  // namespace zr::host::config
