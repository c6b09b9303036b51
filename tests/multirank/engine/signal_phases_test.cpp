// Every signal to every process of a job, in every phase: the exit code, and that nothing is lost which is promised.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <map>
#include <nlohmann/json.hpp>

#include "support/launch_job.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using zr::test::milliseconds;

constexpr int kSteps = 6;

struct Signal {
  const char* name;
  int number;
};
constexpr Signal kSignals[] = {
    {"TERM", SIGTERM}, {"INT", SIGINT}, {"HUP", SIGHUP}, {"KILL", SIGKILL}, {"XFSZ", SIGXFSZ}};
const std::vector<std::string> kTargets{"launcher", "shell", "rank 0", "rank 1"};
const std::vector<std::string> kPhases{"start", "forward", "backward", "exchange", "save", "exit"};

struct Outcome {
  int code;
  int newest;  // the step of the newest checkpoint; 0: none
  std::string stopped_by;
};

class SignalPhasesTest : public testing::TestWithParam<Signal> {
 protected:
  // A job whose ranks pause in `phase`; the process `target` gets the signal while they do.
  Outcome after(const Signal& signal, const std::string& target, const std::string& phase) {
    for (const char* old : {"runs", "c", "marks"}) fs::remove_all(scratch_.path(old));
    fs::create_directory(scratch_.path("marks"));
    zr::test::Scene scene;
    const bool shells = target == "shell";
    const int rank = target == "rank 1" ? 1 : 0;
    zr::test::Job job(scene, command(shells, phase, phase == "exchange" ? rank : -1));
    const auto paused = [&](int which) { return fs::exists(scratch_.path("marks/paused." + std::to_string(which))); };
    // A save is written by the ranks that have a part of it.
    EXPECT_TRUE(zr::test::eventually([&] { return phase == "save" ? paused(0) || paused(1) : paused(0) && paused(1); },
                                     milliseconds(60000)))
        << job.out() << job.err();
    const std::vector<pid_t> started = zr::test::ranks_of(job.pid());
    std::vector<pid_t> ranks = started;
    if (shells) {
      for (pid_t& pid : ranks) pid = child_of(pid);
    }
    ::kill(target == "launcher" ? job.pid() : shells ? started.at(0) : ranks.at(size_t(rank)), signal.number);
    scratch_.write("marks/go", "");
    Outcome outcome{job.wait(milliseconds(60000)), 0, ""};
    for (const pid_t pid : ranks) {
      EXPECT_TRUE(zr::test::eventually([&] { return zr::test::gone(pid); }, milliseconds(60000)))
          << "rank with pid " << pid << " still runs";
    }
    std::ifstream summary(scratch_.path("runs/job/summary.json"));
    const json written = summary ? json::parse(summary, nullptr, false) : json();
    if (written.is_object() && written.value("stopped_by", json()).is_string())
      outcome.stopped_by = written["stopped_by"];
    outcome.newest = newest_verified();
    if (outcome.code != 0) expect_an_error_or_a_signal(job, outcome.code);
    return outcome;
  }
  // The job continues after the signal and has the weights of a job that was never stopped.
  void expect_resumes() {
    const zr::testing::Outcome resumed =
        zr::testing::shell(joined(command(false, "none", -1, {"checkpoint.resume=true"})));
    EXPECT_EQ(resumed.code, 0) << resumed.output;
    EXPECT_EQ(newest_verified(), kSteps);
    EXPECT_EQ(weights(scratch_.path("c")), uninterrupted());
  }

 private:
  static pid_t child_of(pid_t parent) {
    pid_t child = 0;
    const std::string path = "/proc/" + std::to_string(parent);
    std::ifstream(path + "/task/" + std::to_string(parent) + "/children") >> child;
    return child;
  }
  std::vector<std::string> command(bool shells, const std::string& phase, int rank,
                                   const std::vector<std::string>& more = {}, const std::string& folder = "c") const {
    std::vector<std::string> words{ZR_BUILD_DIR "/tests/phases",
                                   phase,
                                   std::to_string(rank),
                                   scratch_.path("marks"),
                                   toml_,
                                   "checkpoint.dir=\"" + scratch_.path(folder) + "\"",
                                   "job.runs=\"" + scratch_.path("runs") + "\""};
    if (shells) words.insert(words.begin(), shell_);
    words.insert(words.end(), more.begin(), more.end());
    return zr::test::launch_of(2, words);
  }
  static std::string joined(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) text += "'" + word + "' ";
    return text;
  }
  int newest_verified() const {
    int newest = 0;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(scratch_.path("c"), none)) {
      int step = 0;
      const std::string name = entry.path().filename();
      if (std::sscanf(name.c_str(), "step-%08d", &step) != 1 || name.size() != 13) continue;
      const zr::testing::Outcome verified =
          zr::testing::shell(ZR_BUILD_DIR "/bin/zeroth verify " + entry.path().string());
      EXPECT_EQ(verified.code, 0) << verified.output;
      newest = std::max(newest, step);
    }
    return newest;
  }
  std::string weights(const std::string& folder) const {
    char name[32];
    std::snprintf(name, sizeof name, "/step-%08d", kSteps);
    const std::string file = scratch_.path("weights.safetensors");
    const zr::testing::Outcome exported =
        zr::testing::shell("rm -f " + file + "; " ZR_BUILD_DIR "/bin/zeroth export " + folder + name + " " + file);
    EXPECT_EQ(exported.code, 0) << exported.output;
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  const std::string& uninterrupted() {
    if (uninterrupted_.empty()) {
      const zr::testing::Outcome run = zr::testing::shell(joined(command(false, "none", -1, {}, "whole")));
      EXPECT_EQ(run.code, 0) << run.output;
      uninterrupted_ = weights(scratch_.path("whole"));
      EXPECT_NE(uninterrupted_, "");
    }
    return uninterrupted_;
  }
  static void expect_an_error_or_a_signal(const zr::test::Job& job, int code) {
    if (code < 128) {
      EXPECT_THAT(job.err(), testing::HasSubstr("zeroth: error: ")) << "code " << code;
    }
  }

  const zr::test::Scratch scratch_;
  const std::string toml_ = scratch_.write("job.toml",
                                           "strategy = \"zero2\"\noptimizer = \"adamw\"\ncommunicator = "
                                           "\"shm\"\n[train]\nsteps = 6\nmicro_batch = 2\n[job]\n"
                                           "threads = 1\n[checkpoint]\nevery = 2\non_signal = \"save\"\n");
  const std::string shell_ = [this] {
    const std::string path = scratch_.write("wrap.sh", "#!/bin/sh\n\"$@\"\nexit $?\n");
    fs::permissions(path, fs::perms::owner_all);
    return path;
  }();
  std::string uninterrupted_;
};

std::string cell(const Outcome& outcome) {
  return std::to_string(outcome.code) + (outcome.newest ? " s" + std::to_string(outcome.newest) : " -") +
         (outcome.stopped_by.empty() ? "" : " " + outcome.stopped_by);
}

// The table of docs/getting-started.md. A job may make another step before it notices a signal.
void expect_promised(const Signal& signal, const std::string& target, const std::string& phase,
                     const Outcome& outcome) {
  const bool saves = signal.number == SIGTERM || signal.number == SIGINT;
  const bool trains = phase != "start" && phase != "exit";
  const int finished = phase == "start" ? 0 : phase == "save" ? 2 : phase == "exit" ? kSteps : 4;  // saved before
  if (signal.number == SIGXFSZ && target != "shell") {
    EXPECT_EQ(outcome.code, 0);
    EXPECT_EQ(outcome.newest, kSteps);
  } else if (signal.number == SIGINT && target == "shell") {  // it waits for its rank, and ends then
    EXPECT_EQ(outcome.code, 4);
    EXPECT_EQ(outcome.newest, kSteps);
  } else if (saves && trains) {
    EXPECT_EQ(outcome.code, 0);
    EXPECT_GT(outcome.newest, finished);
    if (outcome.newest < kSteps) {
      EXPECT_EQ(outcome.stopped_by, std::string("SIG") + signal.name);
    }
  } else {
    EXPECT_EQ(outcome.code, target == "launcher" ? 128 + signal.number : 4);
    EXPECT_GE(outcome.newest, finished);
  }
}

TEST_P(SignalPhasesTest, LosesNothingThatIsPromised) {
  const Signal signal = GetParam();
  for (const std::string& target : kTargets) {
    std::string row = std::string(signal.name) + " to " + target + ":";
    for (const std::string& phase : kPhases) {
      SCOPED_TRACE(row.substr(0, row.find(':')) + " in " + phase);
      const Outcome outcome = after(signal, target, phase);
      expect_promised(signal, target, phase, outcome);
      row += " | " + phase + " " + cell(outcome);
      expect_resumes();
    }
    std::printf("%s\n", row.c_str());
    std::fflush(stdout);
  }
}

INSTANTIATE_TEST_SUITE_P(SLOW_Signals, SignalPhasesTest, testing::ValuesIn(kSignals),
                         [](const auto& info) { return std::string(info.param.name); });
}  // namespace
