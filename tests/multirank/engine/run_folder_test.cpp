// The run folder: one job at a time, nothing written before a job is accepted, earlier runs kept.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "support/engine_test.hpp"
#include "support/launch_job.hpp"

namespace {

using namespace engine_tests;

using testing::HasSubstr;

class RunFolderTest : public EngineTest {
 protected:
  std::string text(const fs::path& file) const {
    std::ifstream in(folder_ / file);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  // The contents of every file below the run folder; for a link, its target.
  std::map<std::string, std::string> contents() const {
    std::map<std::string, std::string> all;
    for (const auto& entry : fs::recursive_directory_iterator(folder_ / "run")) {
      const std::string name = fs::relative(entry.path(), folder_);
      if (entry.is_symlink())
        all[name] = "-> " + fs::read_symlink(entry.path()).string();
      else if (entry.is_regular_file() && entry.path().filename() != "lock")
        all[name] = text(name);
    }
    return all;
  }
  std::vector<int64_t> steps(const std::string& name = "run") const {
    std::vector<int64_t> all;
    for (const auto& row : metrics(name)) all.push_back(row["step"]);
    return all;
  }
};

TEST_F(RunFolderTest, KeepsEarlierRunsAndLinksToTheNewest) {
  ASSERT_EQ(run(2, trains, "train.steps=2").code, 0);
  ASSERT_EQ(run(2, trains, "train.steps=4").code, 0);
  EXPECT_EQ(steps("run/1"), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(steps("run/2"), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(summary("run/1")["steps"], 2);
  EXPECT_EQ(summary()["steps"], 4);
  EXPECT_THAT(text("run/config.toml"), HasSubstr("steps = 4"));
  EXPECT_THAT(text("run/1/config.toml"), HasSubstr("steps = 2"));
}

TEST_F(RunFolderTest, FailedStartChangesNoFile) {
  ASSERT_EQ(run(2, trains, "train.steps=2").code, 0);
  const auto before = contents();
  ASSERT_FALSE(before.at("run/1/summary.json").empty());
  const std::string dir = (folder_ / "ck").string();
  for (const auto& [overrides, code] :
       std::map<std::string, int>{{"offload.optimizer=nvme offload.nvme.path=/nonexistent/x", 3},
                                  {"memory.device_budget=1KiB", 2},
                                  {"checkpoint.init=" + dir, 2},
                                  {"optimizer=adamw optimizer.adamw.eps=-1", 2},
                                  {"checkpoint.every=1 checkpoint.dir=/proc/none", 3}}) {
    const Result result = run(2, trains, overrides);
    EXPECT_EQ(result.code, code) << overrides << "\n" << result.output;
    EXPECT_EQ(contents(), before) << overrides;
  }
}

TEST_F(RunFolderTest, RejectsASecondJobOfTheSameName) {
  zr::test::Scene scene;
  std::vector<std::string> words = zr::test::rank_words(trains);
  words.insert(words.end(), {toml_, "job.name=run", "job.runs=\"" + folder_.string() + "\"", "job.threads=1",
                             "job.ranks=2", "train.steps=1000000"});
  zr::test::Job first(scene, zr::test::launch_of(2, words));
  const auto rows = [&] {
    std::ifstream in(folder_ / "run" / "metrics.jsonl");
    return std::count(std::istreambuf_iterator<char>(in), {}, '\n');
  };
  ASSERT_TRUE(zr::test::eventually([&] { return rows() > 3; }, zr::test::milliseconds(60000))) << first.err();
  const Result second = run(2, trains, "train.steps=2");
  EXPECT_EQ(second.code, 2) << second.output;
  const std::vector<pid_t> ranks = zr::test::ranks_of(first.pid());
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_THAT(second.output, HasSubstr("the run folder " + (folder_ / "run").string() +
                                       " is in use by another job (process " + std::to_string(ranks[0]) + " on "));
  EXPECT_THAT(second.output, HasSubstr("; set job.name or job.runs to another folder, or wait for that job to end"));
  const auto before = rows();
  EXPECT_TRUE(zr::test::eventually([&] { return rows() > before; })) << first.err();
  kill(first.pid(), SIGKILL);
  for (const pid_t pid : ranks) EXPECT_TRUE(zr::test::eventually([&] { return zr::test::gone(pid); }));
  EXPECT_FALSE(fs::exists(folder_ / "run" / "summary.json")) << "the first run was killed";
  ASSERT_EQ(run(2, trains, "train.steps=2").code, 0) << "the kernel releases the lock when its process ends";
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2}));
}

TEST_F(RunFolderTest, FollowsNoSymbolicLink) {
  std::ofstream(folder_ / "victim") << "precious\n";
  const std::string victim = (folder_ / "victim").string();
  fs::create_directories(folder_ / "run");
  for (const char* name : {"metrics.jsonl", "summary.json", "config.toml", "latest"})
    fs::create_symlink(victim, folder_ / "run" / name);
  const Result replaced = run(1, trains, "train.steps=2");
  EXPECT_EQ(replaced.code, 0) << replaced.output;
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(text("victim"), "precious\n");
  fs::remove(folder_ / "run" / "lock");
  fs::create_symlink(victim, folder_ / "run" / "lock");
  const Result locked = run(1, trains, "train.steps=2");
  EXPECT_EQ(locked.code, 3);
  EXPECT_THAT(locked.output,
              HasSubstr("/run/lock: cannot be created: it is a symbolic link, which is not followed here"));
  EXPECT_EQ(text("victim"), "precious\n");
  fs::rename(folder_ / "run", folder_ / "elsewhere");
  fs::create_directory_symlink(folder_ / "elsewhere", folder_ / "run");
  const Result folder = run(1, trains, "train.steps=2");
  EXPECT_EQ(folder.code, 3);
  EXPECT_THAT(folder.output, HasSubstr("/run: cannot be opened: it is a symbolic link"));
}

TEST_F(RunFolderTest, ReplacesNoFileByALink) {
  fs::create_directories(folder_ / "run");
  std::ofstream(folder_ / "run" / "summary.json") << "of the user";
  const Result refused = run(2, trains, "train.steps=2");
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.output, HasSubstr("/run/summary.json is not a link, but a run folder has one there"));
  EXPECT_EQ(text("run/summary.json"), "of the user");
}

TEST_F(RunFolderTest, ResumedRunHasTheRowsUpToTheLoadedStep) {
  const std::string save = " checkpoint.every=2 checkpoint.dir=" + (folder_ / "ck").string();
  ASSERT_EQ(run(2, trains, "train.steps=3" + save).code, 0);
  fs::remove_all(folder_ / "ck" / "step-00000003");
  const std::string first = text("run/1/metrics.jsonl");
  ASSERT_EQ(run(2, trains, "train.steps=5 checkpoint.resume=true" + save).code, 0);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(text("run/1/metrics.jsonl"), first) << "the first run keeps its own rows";
  EXPECT_EQ(text("run/metrics.jsonl").substr(0, first.find("{\"step\":3")), first.substr(0, first.find("{\"step\":3")));
  fs::remove_all(folder_ / "ck");
  ASSERT_EQ(run(2, trains, "train.steps=2 checkpoint.resume=true" + save).code, 0);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2})) << "no checkpoint was loaded";
}

// --- summary.json ---

class RunSummaryTest : public RunFolderTest {
 protected:
  std::string save() const { return " checkpoint.every=2 checkpoint.dir=" + (folder_ / "ck").string(); }
};

// The checkpoint of the last step cannot be written, because a file has replaced the checkpoint folder.
RANK_BODY(last_save_fails, Run) {
  run.build();
  while (run.engine->step_index() < run.engine->steps() - 1) run.micro_step();
  if (run.program.rank() == 0) {
    const fs::path folder = run.program.text("checkpoint.dir");
    fs::rename(folder, folder.string() + ".moved");
    std::ofstream(folder) << "a file\n";
  }
  run.train();
}

TEST_F(RunSummaryTest, IsWrittenAfterTheLastSaveFails) {
  const Result result = run(2, last_save_fails, "train.steps=4" + save());
  EXPECT_EQ(result.code, 3) << result.output;
  const auto json = summary();
  EXPECT_EQ(json["steps"], 4);
  EXPECT_EQ(json["checkpoints"]["saved"], 1);
  EXPECT_EQ(json["checkpoints"]["failed"], 1);
  EXPECT_EQ(json["checkpoints"]["last_step"], 2);
  ASSERT_EQ(run(2, trains, "train.steps=4").code, 0);
  EXPECT_EQ(summary()["weights_hash"], json["weights_hash"]);
}

TEST_F(RunSummaryTest, IsWrittenWhenAResumedRunHasNothingLeftToTrain) {
  ASSERT_EQ(run(2, trains, "train.steps=4" + save()).code, 0);
  const auto first = summary();
  fs::remove(folder_ / "run" / "1" / "summary.json");
  const Result again = run(2, trains, "train.steps=4 checkpoint.resume=true" + save());
  EXPECT_EQ(again.code, 0) << again.output;
  EXPECT_THAT(again.output, HasSubstr("nothing is left to train: 4 steps are done, and train.steps is 4 ("));
  EXPECT_THAT(again.output, HasSubstr("); raise train.steps to continue"));
  EXPECT_EQ(summary()["steps"], 4);
  EXPECT_EQ(summary()["weights_hash"], first["weights_hash"]);
  EXPECT_EQ(summary()["loss"], nullptr) << "no step was trained";
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2, 3, 4}));
}

RANK_BODY(past_the_end, Run) {
  run.build();
  while (run.engine->step_index() < run.engine->steps() + 3) run.micro_step();
  if (std::getenv("FINISH")) {
    run.engine->finish();
    std::ofstream(fs::path(run.program.text("job.runs")) / "hash") << run.engine->weights_hash();
  }
}

// Sets a weight after the last step, so that the hash computed for the last step is outdated.
RANK_BODY(set_after_the_end, Run) {
  run.build();
  run.train();
  run.engine->set("scalar", zr::TensorKind::value, run.engine->get("scalar") + 1);
}

TEST_F(RunSummaryTest, OmitsTheHashOfAnotherStep) {
  const Result past = run(2, past_the_end, "train.steps=2");
  EXPECT_EQ(past.code, 0) << past.output;
  EXPECT_EQ(summary()["steps"], 5);
  EXPECT_EQ(summary()["weights_hash"], nullptr);
  EXPECT_EQ(summary()["communication_bytes"], nullptr);
  EXPECT_THAT(past.output, HasSubstr("step 3 is past train.steps = 2 ("));
  const Result finished =
      shell("export FINISH=1; " ZR_BUILD_DIR "/bin/zeroth launch -n 2 -- " + program(2, past_the_end, "train.steps=2"));
  EXPECT_EQ(finished.code, 0) << finished.output;
  EXPECT_EQ(summary()["steps"], 5);
  EXPECT_EQ(summary()["weights_hash"], text("hash"));
  EXPECT_GT(summary()["communication_bytes"].size(), 1u) << summary()["communication_bytes"];
  ASSERT_EQ(run(2, set_after_the_end, "train.steps=2").code, 0);
  EXPECT_EQ(summary()["weights_hash"], nullptr) << "the weights changed after the last step";
}

}  // namespace
