// Jobs that are killed, stopped, run out of disk space or share a folder: committed checkpoints survive, and training
// can continue.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include <random>

#include "multirank/checkpoint/bodies.hpp"
#include "support/launch_job.hpp"
#include "support/sanitizers.hpp"

namespace zr::test {
namespace {

class CheckpointCrashTest : public CheckpointTest {
 protected:
  // A small gpt on generated text, run with `zeroth train`.
  void SetUp() override {
    std::string text;
    while (text.size() < 60000) text += "the quick brown fox " + std::to_string(text.size() * 7919 % 10007) + "\n";
    scratch_.write("text.txt", text);
    scratch_.write("gpt.toml",
                   "strategy = \"zero2\"\n[job]\nprogram = \"" ZR_BUILD_DIR
                   "/bin/gpt\"\nranks = 2\nthreads = 1\n[model]\nlayers = 2\nwidth = 64\nheads = 2\ncontext = 16\n"
                   "dropout = 0.1\n[train]\nsteps = 40\nmicro_batch = 2\n[data]\ntext = \"text.txt\"\n[sample]\n"
                   "length = 0\n[checkpoint]\ndir = \"c\"\nevery = 1\nkeep = 2\n");
  }
  std::vector<std::string> train(const std::string& name, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words{zeroth(),
                                   "train",
                                   scratch_.path("gpt.toml"),
                                   "job.name=" + name,
                                   "job.runs=" + scratch_.path("runs"),
                                   "checkpoint.dir=" + scratch_.path("c")};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::string words(const std::vector<std::string>& all) const {
    std::string text;
    for (const std::string& one : all) text += "'" + one + "' ";
    return text;
  }
  std::size_t rows(const std::string& name) const { return losses(name).size(); }
};

// Kills one or all ranks until ten ranks are killed, some while a checkpoint is written; resumes under other
// strategies.
TEST_F(CheckpointCrashTest, KilledRanksLoseNoCommittedCheckpoint) {
  std::mt19937 random(5);
  const std::vector<std::vector<std::string>> hows{
      {"strategy=zero0", "job.ranks=1", "train.gradient_accumulation=4"},
      {"strategy=zero1", "job.ranks=2", "train.gradient_accumulation=2"},
      {"strategy=zero2", "job.ranks=4", "train.gradient_accumulation=1"},
      {"strategy=zero3", "job.ranks=2", "train.gradient_accumulation=2"},
      {"strategy=zero3", "job.ranks=1", "train.gradient_accumulation=4"},
      {"strategy=zero2", "job.ranks=2", "train.gradient_accumulation=2", "checkpoint.async=true"}};
  ASSERT_EQ(shell(words(train("uninterrupted", {"checkpoint.every=0", "train.gradient_accumulation=2"}))).code, 0);
  int kills = 0, writing = 0;
  for (int round = 0; round < 60 && kills < 10; ++round) {
    Scene scene;
    std::vector<std::string> how = hows[static_cast<std::size_t>(round) % hows.size()];
    how.emplace_back("checkpoint.resume=true");
    Job job(scene, train("killed", how));
    const std::size_t before = rows("killed");
    const bool in_save = round % 3 != 2;
    eventually(
        [&] {
          const bool begun = rows("killed") > before + 1 || rows("killed") == 40;
          if (!in_save) return begun || gone(job.pid());
          bool partial = false;
          std::error_code error;
          for (const auto& entry : fs::directory_iterator(scratch_.path("c"), error))
            partial |= entry.path().string().ends_with(".partial");
          return (begun && partial) || gone(job.pid());
        },
        milliseconds(20000));
    std::vector<pid_t> ranks = ranks_of(job.pid());
    if (ranks.empty()) {
      job.wait();
      break;  // the job has finished
    }
    if (round % 2) ranks = {ranks[random() % ranks.size()]};
    for (const pid_t rank : ranks) kills += ::kill(rank, SIGKILL) == 0;
    job.wait();
    for (const std::string& name : names_in("c")) writing += name.ends_with(".partial");
    if (!host::checkpoint::checkpoints_in(scratch_.path("c")).empty()) {
      EXPECT_EQ(shell(zeroth_bin() + "verify c").code, 0);
    }
  }
  std::printf("%d ranks killed, %d unfinished saves left\n", kills, writing);
  EXPECT_GE(kills, 10);
  EXPECT_GE(writing, 1) << "no rank was killed while a checkpoint was being written";
  const Outcome last = shell(words(train("killed", {"train.gradient_accumulation=2", "checkpoint.resume=true"})));
  ASSERT_EQ(last.code, 0) << last.output;
  EXPECT_EQ(hash("killed"), hash("uninterrupted"));
  EXPECT_EQ(losses("killed"), losses("uninterrupted"));
  EXPECT_EQ(names_in("c"), (std::vector<std::string>{"lock", "step-00000039", "step-00000040"}))
      << "unfinished saves must be removed";
}

// Saves under one strategy and world size and resumes under another: every pair of any two of the four values (saving
// strategy, saving world size, resuming strategy, resuming world size) occurs.
TEST_F(CheckpointCrashTest, SLOW_ResumesBitIdenticallyUnderAnotherStrategyAndWorldSize) {
  const std::vector<std::string> strategies{"zero0", "zero1", "zero2", "zero3"};
  const std::vector<int> worlds{1, 2, 3, 4, 8};
  const std::vector<std::size_t> shift{0, 2, 1, 3, 2};
  const auto job = [&](const std::string& name, std::size_t strategy, int ranks, const std::string& folder,
                       std::vector<std::string> more) {
    more.insert(more.end(), {"strategy=" + strategies[strategy % 4], "job.ranks=" + std::to_string(ranks),
                             "train.gradient_accumulation=" + std::to_string(24 / ranks), "train.micro_batch=1",
                             "model.width=16", "checkpoint.dir=" + scratch_.path(folder)});
    const Outcome done = shell(words(train(name, more)));
    EXPECT_EQ(done.code, 0) << name << "\n" << done.output;
  };
  job("uninterrupted", 0, 1, "none", {"train.steps=2", "checkpoint.every=0"});
  for (std::size_t i = 0; i < worlds.size(); ++i)
    for (std::size_t j = 0; j < worlds.size(); ++j) {
      const std::string name = std::to_string(i) + std::to_string(j);
      job("first" + name, i + j, worlds[i], name, {"train.steps=1"});
      job("rest" + name, shift[i] + j, worlds[j], name, {"train.steps=2", "checkpoint.resume=true"});
      EXPECT_EQ(hash("rest" + name), hash("uninterrupted"))
          << strategies[(i + j) % 4] << " on " << worlds[i] << ", then " << strategies[(shift[i] + j) % 4] << " on "
          << worlds[j];
    }
}

TEST_F(CheckpointCrashTest, SignalSavesCheckpointAndExitsWithZero) {
  for (const auto& [signal, ranks] : {std::pair{SIGTERM, 2}, {SIGINT, 2}, {SIGTERM, 1}}) {
    const std::vector<std::string> world{"job.ranks=" + std::to_string(ranks),
                                         "train.gradient_accumulation=" + std::to_string(4 / ranks)};
    const auto with_world = [&world](std::vector<std::string> keys) {
      keys.insert(keys.end(), world.begin(), world.end());
      return keys;
    };
    fs::remove_all(scratch_.path("c"));
    fs::remove_all(scratch_.path("runs"));
    Scene scene;
    Job job(scene,
            train("stopped", with_world({"train.steps=100000", "checkpoint.every=0", "checkpoint.on_signal=save"})));
    ASSERT_TRUE(eventually([&] { return rows("stopped") > 5; }));
    ::kill(job.pid(), signal);
    EXPECT_EQ(job.wait(), 0) << job.err();
    const Json stopped = summary("stopped");
    EXPECT_EQ(stopped["stopped_by"], signal == SIGTERM ? "SIGTERM" : "SIGINT");
    const int64_t step = stopped["steps"];
    EXPECT_EQ(host::checkpoint::checkpoints_in(scratch_.path("c")),
              std::vector<std::string>{host::checkpoint::checkpoint_name(step)});
    const std::string steps = "train.steps=" + std::to_string(step + 5);
    ASSERT_EQ(shell(words(train("uninterrupted", with_world({steps, "checkpoint.every=0"})))).code, 0);
    std::vector<std::string> resume = train("stopped", with_world({steps}));
    resume.insert(resume.begin() + 2, "--resume");
    const Outcome rest = shell(words(resume));
    ASSERT_EQ(rest.code, 0) << rest.output;
    EXPECT_EQ(hash("stopped"), hash("uninterrupted"));
    EXPECT_EQ(losses("stopped"), losses("uninterrupted"));
  }
}

TEST_F(CheckpointCrashTest, SignalWithoutOnSignalKeyEndsJobImmediately) {
  Scene scene;
  Job job(scene, train("stopped", {"train.steps=100000", "checkpoint.every=0"}));
  ASSERT_TRUE(eventually([&] { return rows("stopped") > 5; }));
  ::kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM);
  EXPECT_TRUE(host::checkpoint::checkpoints_in(scratch_.path("c")).empty());
}

TEST_F(CheckpointCrashTest, RejectsSecondJobInSameFolder) {
  Scene scene;
  Job first(scene, train("first", {"train.steps=100000", "checkpoint.every=1000"}));
  ASSERT_TRUE(eventually([&] { return rows("first") > 2; }));
  const Outcome second = shell(words(train("second")));
  EXPECT_EQ(second.code, 2) << second.output;
  EXPECT_NE(second.output.find("another job is saving to this folder (process "), std::string::npos) << second.output;
  EXPECT_NE(second.output.find("; give each job its own folder (checkpoint.dir)"), std::string::npos);
  ::kill(first.pid(), SIGKILL);
  first.wait();
}

// Saves to a tmpfs that is too small for the second checkpoint, in its own mount namespace.
TEST_F(CheckpointCrashTest, FullDiskKeepsEarlierCheckpointsAndTrainingContinues) {
  for (const std::string how : {"false", "true"}) {
    const std::string script = scratch_.write(
        "full.sh",
        "mkdir -p disk && mount -t tmpfs -o size=2m none disk && echo mounted && " +
            words(train("full" + how, {"train.steps=6", "checkpoint.every=2", "checkpoint.keep=0",
                                       "checkpoint.async=" + how, "checkpoint.dir=" + scratch_.path("disk")})) +
            "\necho code $?\nls disk\n" + zeroth_bin() + "verify disk\n");
    Outcome done = shell("unshare --mount sh " + script);
    if (done.output.find("mounted") == std::string::npos) done = shell("unshare --mount --map-root-user sh " + script);
    if (done.output.find("mounted") == std::string::npos)
      GTEST_SKIP() << "cannot create a mount namespace: " << done.output;
    EXPECT_NE(done.output.find("step 4 was not saved: rank 0: "), std::string::npos) << done.output;
    EXPECT_NE(done.output.find("No space left on device; free space on this disk, or use another folder (earlier "
                               "checkpoints are unchanged); training continues"),
              std::string::npos)
        << done.output;
    EXPECT_NE(done.output.find("code 3\nlock\nstep-00000002\ndisk/step-00000002: intact, step 2"), std::string::npos)
        << done.output;
    EXPECT_EQ(rows("full" + how), 6u) << "all steps must run although saves fail";
  }
}

std::string step_folder(int64_t step) {
  const std::string digits = std::to_string(step);
  return "step-" + std::string(8 - digits.size(), '0') + digits;
}

// With checkpoint.async, the first save goes to a folder that cannot be created; a later step reports the failure.
RANK_BODY(hears_of_a_failure, Run) {
  run.build();
  run.micro_step();
  EXPECT_TRUE(thrown_by([&] { run.engine->save(checkpoint_folder() + "/file/below"); }).empty())
      << "save() returns before the checkpoint is written";
  std::string error;
  for (int i = 0; i < 200 && error.empty(); ++i) error = thrown_by([&] { run.micro_step(); });
  say(run, error);
  const int64_t step = run.engine->step_index();
  run.micro_step();
  EXPECT_EQ(run.engine->step_index(), step + 1) << "training continues";
  const std::string folder = run.engine->save(checkpoint_folder() + "/good");
  EXPECT_EQ(folder, checkpoint_folder() + "/good/" + step_folder(step + 1)) << "the next save succeeds";
}

TEST_F(CheckpointCrashTest, AsyncSaveFailureIsReportedAtLaterStep) {
  scratch_.write("c/file", "a file, not a folder");
  const Outcome done = run_pair(hears_of_a_failure, "checkpoint.async=true train.steps=300");
  EXPECT_EQ(done.code, 0) << done.output;
  EXPECT_NE(done.output.find("c/file/below: cannot be created: Not a directory"), std::string::npos) << done.output;
}

// tests/multirank/plugins/file_calls.cpp counts the file-system calls of this thread.
RANK_BODY(touches_no_file, Run) {
  const auto calls = reinterpret_cast<int64_t (*)()>(::dlsym(RTLD_DEFAULT, "zr_file_calls_of_this_thread"));
  EXPECT_NE(calls, nullptr) << "the counter library is loaded (LD_PRELOAD)";
  run.build();
  run.micro_step();
  const int64_t before = calls();
  std::ofstream(checkpoint_folder() + "-own" + std::to_string(run.program.rank())) << "one";
  EXPECT_GT(calls(), before) << "the counter counts a file that this thread writes";
  const int64_t start = calls();
  run.engine->save(checkpoint_folder());
  const int64_t of_save = calls() - start;
  EXPECT_EQ(of_save, 0) << "an asynchronous save makes no file-system call on this thread, but made " +
                               std::to_string(of_save);
  run.engine->save(checkpoint_folder());  // waits for the first save
  EXPECT_EQ(calls(), start) << "waiting for the previous save makes no file-system call";
}

TEST_F(CheckpointCrashTest, AsyncSaveMakesNoFileCallsOnTrainingThread) {
  if (kSanitized) GTEST_SKIP() << "the runtime of the sanitizer must be the first library that is preloaded";
  const Outcome done =
      shell("CHECKPOINT=" + scratch_.path("c") + " LD_PRELOAD=" ZR_BUILD_DIR "/tests/libzr_test_file_calls.so " +
            launch(2, touches_no_file, "checkpoint.async=true"));
  EXPECT_EQ(done.code, 0) << done.output;
}

}  // namespace
}  // namespace zr::test
