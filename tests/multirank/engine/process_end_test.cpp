// Engines and scopes of every lifetime, and children of ranks: how their processes end, and what is written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "support/launch_job.hpp"
#include "support/sanitizers.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;
using zr::testing::Outcome;
namespace fs = std::filesystem;

class ProcessEndTest : public testing::Test {
 protected:
  // Runs the program in a mode, on one rank without a launcher, or under `zeroth launch`.
  Outcome run(const std::string& mode, int ranks = 1, const std::string& overrides = "",
              const std::string& before = "") const {
    const std::string launch = ranks > 1 ? ZR_BUILD_DIR "/bin/zeroth launch -n " + std::to_string(ranks) + " -- " : "";
    return zr::testing::shell("cd " + scratch_.folder().string() + " && rm -rf runs saved && " + before + launch +
                              ZR_BUILD_DIR "/tests/lifetime " + mode + " job.toml " + overrides);
  }
  // The summary of the newest run; null without one.
  json summary() const {
    std::ifstream in(scratch_.path("runs/job/summary.json"));
    return in ? json::parse(in, nullptr, false) : json();
  }
  const zr::test::Scratch scratch_;
  const std::string toml_ = scratch_.write("job.toml",
                                           "strategy = \"zero3\"\noptimizer = \"adamw\"\ncommunicator = \"shm\"\n"
                                           "[train]\nsteps = 3\nmicro_batch = 2\n[job]\nthreads = 1\n");
};

// Jobs whose ranks are started by a shell that waits for them, and that save a checkpoint after a signal.
class SignalToAWrappedJobTest : public ProcessEndTest {
 protected:
  static pid_t child_of(pid_t parent) {
    pid_t child = 0;
    const std::string path = "/proc/" + std::to_string(parent);
    std::ifstream(path + "/task/" + std::to_string(parent) + "/children") >> child;
    return child;
  }
  // Starts two ranks, waits until they train, sends `signal` to a process of the job, and returns the exit code.
  int code_after(int signal, const std::function<pid_t(pid_t launcher, const std::vector<pid_t>& shells)>& process) {
    fs::remove_all(scratch_.path("runs"));
    fs::remove_all(scratch_.path("c"));
    zr::test::Scene scene;
    zr::test::Job job(
        scene, zr::test::launch_of(2, {shell_, ZR_BUILD_DIR "/tests/lifetime", "namespace", toml_,
                                       "train.steps=100000000", "job.runs=\"" + scratch_.path("runs") + "\"",
                                       "checkpoint.dir=\"" + scratch_.path("c") + "\"", "checkpoint.on_signal=save"}));
    const auto rows = [&] {
      std::ifstream in(scratch_.path("runs/job/metrics.jsonl"));
      return std::count(std::istreambuf_iterator<char>(in), {}, '\n');
    };
    EXPECT_TRUE(zr::test::eventually([&] { return rows() > 3; }, zr::test::milliseconds(60000))) << job.err();
    ::kill(process(job.pid(), zr::test::ranks_of(job.pid())), signal);
    const int code = job.wait(zr::test::milliseconds(60000));
    EXPECT_THAT(job.err(), Not(HasSubstr("zeroth: error"))) << job.out();
    return code;
  }
  void expect_saved(const char* signal) const {
    const json written = summary();
    EXPECT_EQ(written.value("stopped_by", ""), signal);
    char name[32];
    std::snprintf(name, sizeof name, "c/step-%08d", written.value("steps", -2));
    EXPECT_TRUE(fs::exists(scratch_.path(name) + "/manifest.json")) << name;
  }
  const std::string shell_ = [this] {
    const std::string path = scratch_.write("wrap.sh", "#!/bin/sh\n\"$@\"\nexit $?\n");
    fs::permissions(path, fs::perms::owner_all);
    return path;
  }();
};

TEST_F(SignalToAWrappedJobTest, SavesIfTheLauncherGetsIt) {
  for (const auto& [signal, name] : {std::pair{SIGTERM, "SIGTERM"}, {SIGINT, "SIGINT"}}) {
    EXPECT_EQ(code_after(signal, [](pid_t launcher, const auto&) { return launcher; }), 0);
    expect_saved(name);
  }
}

TEST_F(SignalToAWrappedJobTest, SavesIfAShellGetsIt) {
  EXPECT_EQ(code_after(SIGTERM, [](pid_t, const auto& shells) { return shells.at(0); }), 0);
  expect_saved("SIGTERM");
}

TEST_F(SignalToAWrappedJobTest, SavesIfARankGetsIt) {
  EXPECT_EQ(code_after(SIGTERM, [](pid_t, const auto& shells) { return child_of(shells.at(1)); }), 0);
  expect_saved("SIGTERM");
}

// As a scheduler does that ends all processes of a job.
TEST_F(SignalToAWrappedJobTest, SavesIfTheGroupOfAShellGetsIt) {
  EXPECT_EQ(code_after(SIGTERM, [](pid_t, const auto& shells) { return -shells.at(1); }), 0);
  expect_saved("SIGTERM");
}

TEST_F(ProcessEndTest, OutOfMemoryListsWhatTheRankHoldsAndTheKeysToLower) {
  if (zr::test::kSanitized) GTEST_SKIP() << "the allocator of sanitizers ends the process";
  const Outcome ended = run("no_memory_in_forward");
  EXPECT_EQ(ended.code, 3) << ended.output;
  EXPECT_THAT(ended.output, testing::ContainsRegex("can't allocate memory: you tried to allocate 1125899906842624 bytes"
                                                   ".*; memory of rank 0 by kind:\n"));
  for (const char* line : {"  gradients    device planned ", "  optimizer    device planned ",
                           "; 1.00 PiB more were requested\nlower train.micro_batch (now 2) and raise "
                           "train.gradient_accumulation, use zr::checkpoint in the model, or set offload.activations; "
                           "otherwise raise job.ranks (now 1), "})
    EXPECT_THAT(ended.output, HasSubstr(line));
  EXPECT_THAT(ended.output, Not(HasSubstr("frame #")));
}

// A write beyond the limit of file sizes is an error that names the file and the limit.
TEST_F(ProcessEndTest, NamesTheFileThatExceedsTheLimitOfFileSizes) {
  const Outcome ended = run("namespace", 1, "", "prlimit --fsize=1000 ");
  EXPECT_EQ(ended.code, 3) << ended.output;
  EXPECT_THAT(
      ended.output,
      HasSubstr("/runs/job/1/.config.toml.tmp: writing at byte 1000 failed: File too large; files of this process "
                "may have at most 1000 B (ulimit -f): raise this limit\n"));
}

// Rows of metrics.jsonl that cannot be written do not cost the training: it ends, saves, and then fails.
TEST_F(ProcessEndTest, TrainsToItsEndIfRowsCannotBeWritten) {
  const Outcome ended =
      run("namespace", 1, "train.steps=200 checkpoint.dir=saved checkpoint.every=200", "prlimit --fsize=20000 ");
  EXPECT_EQ(ended.code, 3) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("ulimit -f): raise this limit; training continues, and later rows try again to "
                                      "write the rows since then\n"));
  EXPECT_TRUE(fs::exists(scratch_.path("saved/step-00000200/manifest.json"))) << ended.output;
}

struct End {
  const char* mode;
  int code;
  int steps;  // in summary.json; -1: no summary
};

TEST_F(ProcessEndTest, EnginesOfEveryLifetimeEndWithTheCodeOfTheProgram) {
  const std::vector<End> ends{{"namespace", 0, 3},
                              {"before_its_model", 0, 3},
                              {"function", 0, 3},
                              {"thread", 0, 3},
                              {"other_thread", 0, 3},
                              {"leaked", 0, 3},
                              {"exception", 1, -1},
                              {"exit", 5, -1},
                              {"exit_after_exception", 5, -1},
                              {"exit_in_callback", 0, 2},
                              {"exit_in_schedule", 6, -1},
                              {"exit_in_forward", 7, -1},
                              {"exit_while_a_thread_is_in_a_call", 0, -1},
                              {"scopes", 0, 3},
                              {"deferred", 0, -1},
                              {"quick_exit", 0, -1}};
  for (const End& end : ends) {
    const Outcome ended = run(end.mode);
    EXPECT_EQ(ended.code, end.code) << end.mode << "\n" << ended.output;
    const json written = summary();
    EXPECT_EQ(written.is_object() ? written.value("steps", -2) : -1, end.steps) << end.mode << "\n" << ended.output;
  }
}

TEST_F(ProcessEndTest, EnginesOfRanksLeaveTheJob) {
  for (const End& end : {End{"namespace", 0, 3}, {"function", 0, 3}, {"scopes", 0, 3}}) {
    const Outcome ended = run(end.mode, 2);
    EXPECT_EQ(ended.code, end.code) << end.mode << "\n" << ended.output;
    EXPECT_EQ(summary().value("steps", -2), end.steps) << end.mode << "\n" << ended.output;
  }
  const Outcome ended = run("exit_after_exception", 2);
  EXPECT_EQ(ended.code, 5) << ended.output;
}

TEST_F(ProcessEndTest, ARankThatExitsWhileOthersTrainIsNamed) {
  const Outcome ended = run("exit_on_one_rank", 2);
  EXPECT_EQ(ended.code, 4) << ended.output;
  EXPECT_THAT(ended.output,
              HasSubstr("rank 1 exited after step 1 (at the end of main, or by exit) while rank 0 waits in "));
}

TEST_F(ProcessEndTest, ARunThatFailsBeforeItsFirstStepHasASummary) {
  const Outcome ended = run("fails_at_once");
  EXPECT_EQ(ended.code, 1) << ended.output;
  EXPECT_EQ(summary()["steps"], 0);
  EXPECT_EQ(summary()["failed"], true);
  EXPECT_EQ(summary()["loss"], json());
  ASSERT_EQ(run("namespace").code, 0);
  EXPECT_EQ(summary()["failed"], false);
}

TEST_F(ProcessEndTest, AFunctionOfAtexitUsesTheEngineIfItWasPassedAfterTheEngineWasMade) {
  const Outcome saved = run("saves_at_exit");
  EXPECT_EQ(saved.code, 0) << saved.output;
  EXPECT_THAT(saved.output, HasSubstr("saved saved/step-00000003\n"));
  EXPECT_TRUE(std::filesystem::exists(scratch_.path("saved/step-00000003/manifest.json")));
  const Outcome late = run("late_at_exit");
  EXPECT_EQ(late.code, 0) << late.output;
  EXPECT_THAT(
      late.output,
      HasSubstr("engine.save() was called after the end of the engine, because the process exits; call it before, or "
                "in a function that is passed to std::atexit after the engine was made\n"));
}

// The children are made within a scope of zr::gather, so that they also end that scope.
TEST_F(ProcessEndTest, ChildrenOfRanksNeitherEndNorChangeTheJob) {
  const Outcome alone = run("namespace", 2);
  ASSERT_EQ(alone.code, 0) << alone.output;
  const json expected = summary();
  const Outcome ended = run("children", 2);
  EXPECT_EQ(ended.code, 0) << ended.output;
  for (const char* text :
       {"child returns: 9\n", "child throws: 1\n", "child exits: 9\n", "child ends: 9\n", "child executes: 9\n",
        "child trains: 2\n", "child computes: 2\n", "child joins: 2\n",
        "zeroth: error: the program threw std::runtime_error: in the child\n",
        "zeroth: error: a process made by fork() uses a parameter that an engine of its parent trains, which would "
        "exchange data with the ranks of the job; use the model only in the process that created the engine, or copy "
        "its "
        "weights there before fork() (zr::gather, clone())\n",
        "zeroth: error: engine.barrier() was called in a process made by fork(); use the engine only in the process "
        "that "
        "created it\n",
        "zeroth: error: a process made by fork() cannot join the job, of which its parent is a rank; create "
        "zr::Program "
        "and zr::Engine only in the process that the launcher has started\n"})
    EXPECT_THAT(ended.output, HasSubstr(text));
  EXPECT_EQ(summary()["steps"], 3);
  EXPECT_EQ(summary()["weights_hash"], expected["weights_hash"]);
}

}  // namespace
