#include <gtest/gtest.h>

#include "base/error.hpp"
#include "config/key_reader.hpp"
#include "support/sample_keys.hpp"

namespace zr::host {

using sample::check;

TEST(JobConfigTest, GivesEveryKeyItsDefault) {
  const config::JobConfig config = check("");
  EXPECT_EQ(config::KeyReader(config).integer("job.ranks"), 1);
  EXPECT_EQ(config::KeyReader(config).number("optimizer.lr"), 1e-3);
  EXPECT_EQ(config::KeyReader(config).text("train.dtype"), "fp32");
  EXPECT_EQ(config::KeyReader(config).integer("strategy.flat.bucket_bytes"), 16 << 20);
  EXPECT_EQ(config::KeyReader(config).number("communicator.timeout"), 300);
  EXPECT_EQ(config::KeyReader(config).numbers("optimizer.adam.betas"), (std::vector<double>{0.9, 0.999}));
  EXPECT_TRUE(config::KeyReader(config).boolean("optimizer.adam.fused"));
  EXPECT_EQ(config::KeyReader(config).origin("job.ranks").text(), "default");
  EXPECT_FALSE(config::KeyReader(config).given("job.ranks"));
}

TEST(JobConfigTest, ReadsUnitsInValues) {
  const config::JobConfig config = check("[communicator]\ntimeout = \"1.5h\"", {"strategy.flat.bucket_bytes=64KiB"});
  EXPECT_EQ(config::KeyReader(config).number("communicator.timeout"), 5400);
  EXPECT_EQ(config::KeyReader(config).integer("strategy.flat.bucket_bytes"), 65536);
  EXPECT_EQ(config::KeyReader(config).entry("strategy.flat.bucket_bytes").written, "\"64KiB\"");
  EXPECT_EQ(config::KeyReader(check("", {"strategy.flat.bucket_bytes=8192"})).integer("strategy.flat.bucket_bytes"),
            8192);
}

TEST(JobConfigTest, AcceptsAnIntegerAsANumberAndRecordsItsPosition) {
  const config::JobConfig config = check("[train]\ngradient_clipping = 1\n  steps = 7");
  EXPECT_EQ(config::KeyReader(config).number("train.gradient_clipping"), 1.0);
  EXPECT_EQ(config::KeyReader(config).number("train.steps"), 7.0);
  EXPECT_EQ(config::KeyReader(config).origin("train.gradient_clipping").text(), "job.toml:7:21");
  EXPECT_EQ(config::KeyReader(config).origin("train.steps").text(), "job.toml:8:11");
  EXPECT_TRUE(config::KeyReader(config).given("train.steps"));
}

TEST(JobConfigTest, CommandLineOverridesTheFile) {
  const config::JobConfig config =
      check("[train]\nsteps = 7", {"train.steps=20", "job.name=2024", "train.gradient_clipping=1e-1", "model.kind=mlp",
                                   "optimizer.adam.betas=[0, 0.5]", "optimizer.adam.fused=false"});
  EXPECT_EQ(config::KeyReader(config).integer("train.steps"), 20);
  EXPECT_EQ(config::KeyReader(config).text("job.name"), "2024");
  EXPECT_EQ(config::KeyReader(config).number("train.gradient_clipping"), 0.1);
  EXPECT_EQ(config::KeyReader(config).text("model.kind"), "mlp");
  EXPECT_EQ(config::KeyReader(config).numbers("optimizer.adam.betas"), (std::vector<double>{0, 0.5}));
  EXPECT_FALSE(config::KeyReader(config).boolean("optimizer.adam.fused"));
  EXPECT_EQ(config::KeyReader(config).origin("train.steps").text(), "command line");
  EXPECT_TRUE(config::KeyReader(config).given("train.steps"));
}

TEST(DocumentTest, AutoChoosesTheCommunicatorForTheHostsOfTheJob) {
  for (const std::string text : {"", "communicator = \"auto\"", "[communicator]\nuse = \"auto\""}) {
    config::Document document = config::Document::parse(text, "job.toml", {});
    EXPECT_EQ(document.chosen("communicator"), "shm");
    document.set_several_hosts();
    EXPECT_EQ(document.chosen("communicator"), "mpi");
  }
  config::Document named = config::Document::parse("communicator = \"nccl\"", "job.toml", {});
  named.set_several_hosts();
  EXPECT_EQ(named.chosen("communicator"), "nccl");
}

TEST(JobConfigTest, UsesTheLastOfTwoOverrides) {
  EXPECT_EQ(config::KeyReader(check("", {"train.steps=1", "train.steps=2"})).integer("train.steps"), 2);
}

TEST(JobConfigTest, RejectsAValueOfTheProgramThatIsNotUtf8) {
  for (const std::string bad : {"/tmp/\xff", "/tmp/\xc3", "/tmp/\xed\xa0\x80"}) {
    try {
      config::Document::parse("", "job.toml", {}, {"checkpoint.init=\"" + bad + "\""});
      FAIL() << "no error";
    } catch (const UserError& error) {
      EXPECT_EQ(std::string(error.what())
                    .find("zr::Configuration::set: checkpoint.init: byte 7 of the value is not "
                          "UTF-8: '\"/tmp/\\x"),
                0u)
          << error.what();
    }
  }
  const config::Document utf8 = config::Document::parse("", "job.toml", {"checkpoint.init=/tmp/\u00fc\u20ac"});
  EXPECT_EQ(config::KeyReader(utf8.check({}, 1)).text("checkpoint.init"), "/tmp/\u00fc\u20ac");
}

TEST(JobConfigTest, ReadsAnOverrideAsAString) {
  // A value that contains a second assignment is one string, not two keys.
  EXPECT_EQ(config::KeyReader(check("", {"data.text=a = 1\ntrain.steps = 9"})).text("data.text"),
            "a = 1\ntrain.steps = 9");
  EXPECT_EQ(config::KeyReader(check("", {"data.text=\"quoted\""})).text("data.text"), "quoted");
  EXPECT_EQ(config::KeyReader(check("", {"data.text=true"})).text("data.text"), "true");
  EXPECT_EQ(config::KeyReader(check("", {"data.text="})).text("data.text"), "");
}

TEST(JobConfigTest, SwitchesAPluginFromTheCommandLine) {
  // The file's table for the plug-in that is no longer chosen is ignored.
  const std::string toml = "[strategy]\nuse = \"flat\"\n[strategy.flat]\nbucket_bytes = \"1MiB\"\n";
  const config::Document document = config::Document::parse(toml, "job.toml", {"strategy=cut", "data.text=a"});
  EXPECT_EQ(document.chosen("strategy"), "cut");
  const config::JobConfig config =
      document.check({{"data", "text", ZR_KEY_STRING, "", "text"}}, 1, {{"strategy", {"flat"}}});
  EXPECT_EQ(config::KeyReader(config).text("strategy"), "cut");
  EXPECT_FALSE(config::KeyReader(config).has("strategy.flat.bucket_bytes"));
}

namespace {
// The warnings of a file; sample::unselected() has the keys of an optimizer that is not selected.
std::vector<std::string> warnings_of(const std::string& toml, std::vector<std::string> overrides) {
  overrides.insert(overrides.end(), {"strategy=flat", "data.text=a"});
  config::PluginIds others = sample::others();
  others["optimizer"].clear();
  const config::JobConfig config = config::Document::parse(toml, "job.toml", overrides)
                                       .check(sample::keys(), 1, others, nullptr, sample::unselected());
  EXPECT_FALSE(config::KeyReader(config).has("optimizer.sgd.momentum"));
  EXPECT_FALSE(config::KeyReader(config).has("schedule.linear.warmup"));
  return config.warnings();
}
using Texts = std::vector<std::string>;
}  // namespace

TEST(JobConfigTest, AcceptsTablesOfSeveralPluginsAndSchedulesInAFileThatSelectsOne) {
  EXPECT_EQ(warnings_of("[optimizer]\nuse = \"adam\"\n[optimizer.sgd]\nmomentum = 0.5\n"
                        "[schedule]\nuse = \"cosine\"\n[schedule.linear]\nwarmup = 3\n",
                        {}),
            Texts{});
}

TEST(JobConfigTest, WarnsOfValuesForAPluginThatTheCommandLineDoesNotSelect) {
  EXPECT_EQ(warnings_of("optimizer = \"adam\"", {"optimizer.sgd.momentum=0.5"}),
            Texts{"command line: optimizer.sgd.momentum has no effect, because optimizer = \"adam\" (job.toml:1:13) is "
                  "selected; to use the table, set optimizer = \"sgd\""});
}

TEST(JobConfigTest, WarnsOfATableForAPluginInAFileThatSelectsNone) {
  EXPECT_EQ(warnings_of("[optimizer.sgd]\nmomentum = 0.5\nstart = \"x\"\n", {}),
            Texts{"job.toml:2:12: optimizer.sgd.momentum, optimizer.sgd.start have no effect, because optimizer = "
                  "\"adamw\" (default) is selected; to use the table, set optimizer = \"sgd\""});
}

TEST(JobConfigTest, WarnsOfATableForAPluginThatCannotBeLoadedAndIsNotSelected) {
  const config::Document document = config::Document::parse("[optimizer]\nuse = \"adam\"\n[optimizer.sgd]\nx = 1\n",
                                                            "job.toml", {"strategy=flat", "data.text=a"});
  const config::JobConfig config = document.check(sample::keys(), 1, sample::others(), nullptr,
                                                  {{"optimizer", "sgd", {}, "job.toml: damaged file"}});
  EXPECT_EQ(config.warnings(), Texts{"job.toml: damaged file; values in [optimizer.sgd] were not checked"});
}

TEST(JobConfigTest, WarnsOfAScheduleThatIsNotSelected) {
  EXPECT_EQ(
      warnings_of("optimizer = \"adam\"\n[schedule.linear]\nwarmup = 3\n", {}),
      Texts{"job.toml:3:10: schedule.linear.warmup has no effect, because schedule.use = \"constant\" (default) is "
            "selected; to use the table, set schedule.use = \"linear\""});
}

TEST(JobConfigTest, ReadsPluginsFromStringTableOrDefault) {
  config::Origin origin;
  const config::Document text = config::Document::parse("strategy = \"flat\"", "job.toml", {});
  EXPECT_EQ(text.chosen("strategy", &origin), "flat");
  EXPECT_EQ(origin.text(), "job.toml:1:12");
  EXPECT_EQ(config::Document::parse("[strategy]\nuse = \"flat\"", "job.toml", {}).chosen("strategy", &origin), "flat");
  EXPECT_EQ(origin.text(), "job.toml:2:7");
  EXPECT_EQ(config::Document::parse("strategy = {use = \"flat\"}", "job.toml", {}).chosen("strategy"), "flat");
  EXPECT_EQ(config::Document::parse("strategy = \"flat\"", "job.toml", {"strategy.flat.bucket_bytes=1MiB"})
                .chosen("strategy"),
            "flat");
  EXPECT_EQ(config::Document::parse("", "job.toml", {"strategy=flat"}).chosen("strategy", &origin), "flat");
  EXPECT_EQ(origin.text(), "command line");
  EXPECT_EQ(config::Document::parse("", "job.toml", {}).chosen("strategy", &origin), "zero0");
  EXPECT_EQ(origin.text(), "default");
  EXPECT_EQ(config::Document::parse("[strategy.flat]", "job.toml", {}).chosen("strategy"), "zero0");
}

TEST(JobConfigTest, NamesTheRunAfterTheFile) {
  EXPECT_EQ(config::KeyReader(check("")).text("job.name"), "job");
  EXPECT_EQ(config::KeyReader(check("[job]\nname = \"mine\"")).text("job.name"), "mine");
}

TEST(JobConfigTest, UsesTheLaunchersNumberOfRanks) {
  const config::JobConfig config = check("[job]\nranks = 2", {}, 3);
  EXPECT_EQ(config::KeyReader(config).integer("job.ranks"), 3);
  EXPECT_EQ(config::KeyReader(config).origin("job.ranks").text(), "launcher");
  EXPECT_EQ(config::KeyReader(config).integer("train.global_batch"), 3);
  EXPECT_EQ(config::KeyReader(check("[job]\nranks = 2")).integer("train.global_batch"), 2);
  EXPECT_EQ(config::KeyReader(check("[job]\nranks = 2", {}, 2)).origin("job.ranks").text(), "job.toml:7:9");
}

TEST(JobConfigTest, ReadsOnlyTheChosenSchedule) {
  const config::JobConfig config =
      check("[schedule]\nuse = \"cosine\"\n[schedule.cosine]\nwarmup = 3\n[schedule.linear]\nwarmup = 5");
  EXPECT_EQ(config::KeyReader(config).integer("schedule.cosine.warmup"), 3);
  EXPECT_FALSE(config::KeyReader(config).has("schedule.linear.warmup"));
}

TEST(JobConfigTest, DerivesADefaultFromAnotherKey) {
  const config::JobConfig config =
      check("[schedule]\nuse = \"linear\"\n[train]\nsteps = 50", {"schedule.linear.warmup=7"});
  EXPECT_EQ(config::KeyReader(config).integer("schedule.linear.decay_from"), 7);
  EXPECT_EQ(config::KeyReader(config).integer("schedule.linear.decay_until"), 50);
  EXPECT_EQ(config::KeyReader(config).origin("schedule.linear.decay_until").text(), "default");
}

TEST(JobConfigTest, MergesGroupValuesWithTheOptimizersValues) {
  const config::JobConfig config = check(
      "[[optimizer.groups]]\nmatch = [\"*.bias\", \"norm*\"]\nweight_decay = 0\nlr_scale = 2\n"
      "[[optimizer.groups]]\nmatch = \"head\"",
      {"optimizer.adam.fused=false"});
  ASSERT_EQ(config.groups().size(), 2u);
  const config::GroupConfig& first = config.groups()[0];
  EXPECT_EQ(first.match, (std::vector<std::string>{"*.bias", "norm*"}));
  EXPECT_EQ(first.lr_scale, 2);
  ASSERT_EQ(first.given_values.size(), 1u);
  ASSERT_EQ(first.values.size(), 3u);
  EXPECT_EQ(first.values[1].key.name, "weight_decay");
  EXPECT_EQ(std::get<double>(first.values[1].value), 0);
  EXPECT_FALSE(std::get<bool>(first.values[2].value));
  EXPECT_EQ(config.groups()[1].match, std::vector<std::string>{"head"});
  EXPECT_EQ(std::get<double>(config.groups()[1].values[1].value), 0.01);
  EXPECT_EQ(config.groups()[1].lr_scale, 1);
}

TEST(JobConfigTest, RoundTripsThroughToml) {
  const config::JobConfig first = check(
      "[job]\nranks = 2\n[train]\nmicro_batch = 4\ngradient_clipping = 0.3\n[communicator]\ntimeout = \"90s\"\n"
      "[schedule]\nuse = \"cosine\"\n"
      "[[optimizer.groups]]\nmatch = \"*.bias\"\nweight_decay = 0\n[model]\nkind = \"mlp\"",
      {"data.text=a \"b\" \\ \t c", "strategy.flat.bucket_bytes=1.5MiB", "optimizer.lr=1e-30"});
  const std::string toml = first.to_toml();
  const config::JobConfig second =
      config::Document::parse(toml, "again.toml", {}).check(sample::keys(), 0, sample::others());
  EXPECT_EQ(second.to_toml(), toml);
  ASSERT_EQ(second.entries().size(), first.entries().size());
  for (std::size_t i = 0; i < first.entries().size(); ++i) {
    EXPECT_EQ(second.entries()[i].key.path(), first.entries()[i].key.path());
    EXPECT_EQ(second.entries()[i].value, first.entries()[i].value) << first.entries()[i].key.path();
  }
  ASSERT_EQ(second.groups().size(), 1u);
  EXPECT_EQ(second.groups()[0].match, first.groups()[0].match);
  EXPECT_EQ(second.groups()[0].values[1].value, first.groups()[0].values[1].value);
}

TEST(JobConfigTest, WritesDerivedValuesAsComments) {
  EXPECT_NE(
      check("[train]\nglobal_batch = 8\nmicro_batch = 2").to_toml().find("# gradient_accumulation = 4  (derived)"),
      std::string::npos);
}

TEST(JobConfigTest, WritesNumbersThatReadBackTheSame) {
  EXPECT_EQ(config::toml_text(1.0), "1.0");
  EXPECT_EQ(config::toml_text(0.1), "0.1");
  EXPECT_EQ(config::toml_text(1e-8), "1e-08");
  EXPECT_EQ(config::toml_text(int64_t{-3}), "-3");
  EXPECT_EQ(config::toml_text(true), "true");
  EXPECT_EQ(config::toml_text(std::string("a\"\n\x01")), "\"a\\\"\\n\\u0001\"");
  EXPECT_EQ(config::toml_text(std::vector<double>{1, 0.5}), "[1.0, 0.5]");
}

TEST(JobConfigTest, RejectsReadingAnUndeclaredKey) {
  const config::JobConfig config = check("");
  EXPECT_THROW(config::KeyReader(config).integer("train.stpes"), Error);
  EXPECT_THROW(config::KeyReader(config).text("train.steps"), Error);
}

TEST(JobConfigTest, RejectsKeysDeclaredTwice) {
  const std::vector<config::ConfigKey> twice{{"train", "steps", ZR_KEY_INT, "1", "of the program"}};
  try {
    config::Document::parse("", "job.toml", {}).check(twice, 1);
    FAIL();
  } catch (const Error& failure) {
    EXPECT_STREQ(failure.what(), "the key 'train.steps' is declared twice");
    EXPECT_EQ(failure.exit_code(), exit_code::internal);
  }
}

}  // namespace zr::host
