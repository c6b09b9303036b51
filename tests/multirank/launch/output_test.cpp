// The output of `zeroth launch`, and the environment and input that it gives its ranks.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/stat.h>

#include <fstream>
#include <set>
#include <sstream>

#include "support/launch_job.hpp"
#include "support/scratch.hpp"

using namespace zr::test;
using testing::ContainsRegex;
using testing::HasSubstr;

namespace {
struct Result {
  int code;
  std::string out, err;
};

Result shell(int ranks, const std::string& script, Environment environment = {}) {
  Scene scene;
  Job job(scene, launch_of(ranks, {"sh", "-c", script}), std::move(environment));
  const int code = job.wait();
  return {code, job.out(), job.err()};
}

std::multiset<std::string> lines_of(const std::string& text) {
  std::multiset<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.insert(line);
  return lines;
}

TEST(ZerothLaunch, PrefixesOutputOfRanksOtherThanZero) {
  const auto result = shell(3, "echo from $ZR_RANK; echo bad $ZR_RANK >&2");
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(lines_of(result.out), (std::multiset<std::string>{"from 0", "[1] from 1", "[2] from 2"}));
  EXPECT_EQ(lines_of(result.err), (std::multiset<std::string>{"bad 0", "[1] bad 1", "[2] bad 2"}));
}

TEST(ZerothLaunch, PassesRank0OutputByteForByte) {
  const auto result = shell(1, "printf 'step 1\\rstep 2\\r\\033[Kdone'; printf '\\n\\n\\000x'");
  EXPECT_EQ(result.out, std::string("step 1\rstep 2\r\x1b[Kdone\n\n\0x", 25));
}

TEST(ZerothLaunch, NeverMixesOutputWithinLine) {
  const auto result =
      shell(4, "i=0; while [ $i -lt 300 ]; do printf 'rank %d ' $ZR_RANK; printf 'line %d\\n' $i; i=$((i+1)); done");
  EXPECT_EQ(result.code, 0);
  std::multiset<std::string> expected;
  for (int rank = 0; rank < 4; ++rank)
    for (int i = 0; i < 300; ++i)
      expected.insert((rank ? "[" + std::to_string(rank) + "] " : "") + "rank " + std::to_string(rank) + " line " +
                      std::to_string(i));
  EXPECT_EQ(lines_of(result.out), expected);
}

TEST(ZerothLaunch, PrintsLastLineWithoutNewline) {
  const auto result = shell(2, "[ $ZR_RANK = 0 ] || printf last");
  EXPECT_EQ(result.out, "[1] last\n");
}

TEST(ZerothLaunch, PrintsIdenticalErrorsOfAllRanksOnce) {
  const auto result = shell(4, "printf 'zeroth: error: gpt.toml:3: no\\n  nearest: yes\\n' >&2; exit 2");
  EXPECT_EQ(result.code, 2);
  std::multiset<std::string> lines;
  for (auto line : lines_of(result.err)) lines.insert(line.rfind("[", 0) == 0 ? line.substr(4) : line);
  EXPECT_EQ(lines.count("zeroth: error: gpt.toml:3: no"), 1u) << result.err;
  EXPECT_EQ(lines.count("  nearest: yes"), 1u) << result.err;
  EXPECT_EQ(lines.size(), 3u) << result.err;  // the third line reports which rank ended with code 2
}

TEST(ZerothLaunch, PrintsIdenticalWarningsOfEveryRank) {
  const auto result = shell(3, "echo 'zeroth: warning: slow' >&2");
  EXPECT_EQ(lines_of(result.err), (std::multiset<std::string>{"zeroth: warning: slow", "[1] zeroth: warning: slow",
                                                              "[2] zeroth: warning: slow"}));
}

enum class Output { terminal, pipe };

// What the standard output of a job of `ranks` ranks receives. The ranks run a shell script, in which `wait_for K`
// waits until the first K texts of `cues` have arrived, one after the other.
std::string received(Output output, const std::string& ranks, const std::string& script,
                     const std::vector<std::string>& cues) {
  const zr::test::Scratch scratch;
  const std::string folder = scratch.folder().string() + "/",
                    prelude = "wait_for() { until [ -e " + folder + "$1 ]; do sleep 0.02; done; }; ";
  int from = -1, ends[2] = {-1, -1};
  if (output == Output::pipe && pipe(ends) != 0) throw std::runtime_error("pipe failed");
  const pid_t pid = output == Output::terminal ? forkpty(&from, nullptr, nullptr, nullptr) : fork();
  if (pid == 0) {
    if (output == Output::pipe) dup2(ends[1], STDOUT_FILENO), close(ends[0]), close(ends[1]);
    execl(zeroth().c_str(), "zeroth", "launch", "-n", ranks.c_str(), "--", "sh", "-c", (prelude + script).c_str(),
          nullptr);
    _exit(127);
  }
  if (output == Output::pipe) from = ends[0], close(ends[1]);
  std::string seen;
  char buffer[4096];
  std::size_t cue = 0, after = 0;
  for (ssize_t n; (n = read(from, buffer, sizeof buffer)) > 0;) {
    seen.append(buffer, size_t(n));
    for (std::size_t at; cue < cues.size() && (at = seen.find(cues[cue], after)) != seen.npos;) {
      after = at + cues[cue].size();
      std::ofstream(folder + std::to_string(++cue));
    }
  }
  int status = 0;
  waitpid(pid, &status, 0);
  close(from);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  return seen;
}

TEST(ZerothLaunch, UnfinishedRank0LineDoesNotBlockOtherRanks) {
  EXPECT_EQ(received(Output::pipe, "2",
                     "if [ $ZR_RANK = 0 ]; then printf half; wait_for 2; echo ' done'; else wait_for 1; echo other; fi",
                     {"half", "[1] other\n"}),
            "half\n[1] other\n done\n");
}

TEST(ZerothLaunch, KeepsProgressLineBelowOtherLinesOnTerminal) {
  EXPECT_EQ(received(Output::terminal, "2",
                     "if [ $ZR_RANK = 0 ]; then printf '\\rstep 1 of 2'; wait_for 2; printf '\\rstep 2\\n'; "
                     "else wait_for 1; echo note; fi",
                     {"step 1 of 2", "note\r\nstep 1 of 2"}),
            "\rstep 1 of 2\r\x1b[K[1] note\r\nstep 1 of 2\rstep 2\r\n");
}

// A progress bar as ranks print it: in shell text, and on the terminal.
const std::string kShellBar = "bar='\\r\\033[2K\\033[2Kbar\\033[0K'; ", kBar = "\r\x1b[2K\x1b[2Kbar\x1b[0K";

TEST(ZerothLaunch, ReplacesProgressBarByTextOfTheProgram) {
  const std::string replaced = kBar + "\r\x1b[K";
  EXPECT_EQ(
      received(Output::terminal, "1",
               kShellBar + "printf \"$bar\"\"text\\n$bar$bar\"; wait_for 1; printf 'more\\n'\"$bar\"; wait_for 2; "
                           "printf '\\n'",
               {"text\r\n" + kBar, "more\r\n" + kBar}),
      replaced + "text\r\n" + kBar + replaced + "more\r\n" + kBar + "\r\n");
}

TEST(ZerothLaunch, KeepsTextWithoutNewlineAboveProgressBar) {
  EXPECT_EQ(
      received(Output::terminal, "1",
               kShellBar + "printf 'part 1'\"$bar\"; wait_for 1; printf 'part 2'; wait_for 2; printf \"$bar\"'\\n'",
               {"part 1\r\n" + kBar, "part 2"}),
      "part 1\r\n" + kBar + "\r\x1b[Kpart 2\r\n" + kBar + "\r\n");
}

TEST(ZerothLaunch, KeepsTextThatReplacedProgressBarBelowOtherLines) {
  EXPECT_EQ(received(Output::terminal, "2",
                     kShellBar + "if [ $ZR_RANK = 0 ]; then printf \"$bar\"'Enter: '; wait_for 2; echo; "
                                 "else wait_for 1; echo note; fi",
                     {"Enter: ", "note\r\n\x1b[KEnter: "}),
            kBar + "\r\x1b[KEnter: \r\x1b[K[1] note\r\n\x1b[KEnter: \r\n");
}

TEST(ZerothLaunch, ClosedOutputEndsJob) {
  Scene scene;
  Job job(scene, {"bash", "-c",
                  "set -o pipefail; " + zeroth() +
                      " launch -n 2 -- sh -c 'while true; do echo x; sleep 0.01; done' | head -1"});
  EXPECT_EQ(job.wait(milliseconds(8000)), 3);
  EXPECT_THAT(job.out(), testing::AnyOf("x\n", "[1] x\n"));  // whichever rank was first
}

TEST(ZerothLaunch, BlockedOutputDelaysNeitherJobEndNorFailureReport) {
  Scene scene;
  Job job(scene,
          {"bash", "-c", zeroth() + " launch -n 3 -- " + rank_program() + " compute_ms=1 2>&1 | (sleep 2.5; cat)"});
  ASSERT_TRUE(
      eventually([&] { return scene.page().ranks[0].phase >= Phase::computing && scene.page().ranks[2].step > 3; }));
  kill(scene.page().ranks[1].pid, SIGKILL);
  EXPECT_TRUE(eventually([&] { return gone(scene.page().ranks[0].pid) && gone(scene.page().ranks[2].pid); },
                         milliseconds(1500)));
  job.wait();
  EXPECT_THAT(job.out(), HasSubstr("was killed by signal 9 (SIGKILL)"));
}

TEST(ZerothLaunch, SetsRankEnvironmentVariables) {
  const auto result = shell(2,
                            "echo $ZR_RANK $ZR_WORLD $ZR_LOCAL_RANK $ZR_LOCAL_WORLD $ZR_THREADS $OMP_NUM_THREADS "
                            "${ZR_STORE%:*} ${#ZR_TOKEN}");
  const int threads = std::max(1, int(std::thread::hardware_concurrency()) / 2);
  const std::string rest = " " + std::to_string(threads) + " " + std::to_string(threads) + " 127.0.0.1 32";
  EXPECT_EQ(lines_of(result.out), (std::multiset<std::string>{"0 2 0 2" + rest, "[1] 1 2 1 2" + rest}));
}

TEST(ZerothLaunch, KeepsUserOmpNumThreads) {
  EXPECT_EQ(shell(1, "echo $OMP_NUM_THREADS", {{"OMP_NUM_THREADS", "3"}}).out, "3\n");
}

TEST(ZerothLaunch, PassesStandardInputToRank0Only) {
  Scene scene;
  Job job(scene, {"bash", "-c", "echo word | " + zeroth() + " launch -n 2 -- sh -c 'read x; echo got $x'"});
  EXPECT_EQ(job.wait(), 0);
  EXPECT_EQ(lines_of(job.out()), (std::multiset<std::string>{"got word", "[1] got"}));
}

Result run(const std::vector<std::string>& program) {
  Scene scene;
  Job job(scene, launch_of(2, program));
  const int code = job.wait();
  return {code, job.out(), job.err()};
}

TEST(ZerothLaunch, RejectsMissingProgram) {
  EXPECT_EQ(run({"/no/such"}).err,
            "zeroth: error: program '/no/such': No such file or directory; give the path of a program\n");
  EXPECT_EQ(run({"/tmp"}).err, "zeroth: error: program '/tmp' is a folder; give the path of a program\n");
  EXPECT_EQ(run({"no-such-program"}).err,
            "zeroth: error: program 'no-such-program' was not found in PATH; give the path of a program\n");
  EXPECT_EQ(run({"no-such-program"}).code, 2);
}

TEST(ZerothLaunch, RejectsProgramThatCannotBeExecuted) {
  Scene scene;
  const auto write = [&](const char* name, const char* text, int mode) {
    const std::string file = scene.folder() / name;
    std::ofstream(file) << text;
    chmod(file.c_str(), mode_t(mode));
    return file;
  };
  const std::string plain = write("plain", "#!/bin/sh\n", 0600), text = write("text", "hello", 0700),
                    lost = write("lost", "#!/no/such/interpreter\n", 0700);
  EXPECT_EQ(run({plain}).err, "zeroth: error: program '" + plain + "' is not executable: chmod +x " + plain + "\n");
  EXPECT_EQ(run({plain}).code, 2);
  EXPECT_EQ(run({text}).err,
            "zeroth: error: '" + text +
                "' cannot be executed: it is neither a program for this machine nor a script that begins with #!; "
                "give another file\n");
  EXPECT_EQ(run({text}).code, 2);
  EXPECT_EQ(run({lost}).err, "zeroth: error: '" + lost +
                                 "' cannot be executed: its interpreter or loader does not exist; install it (a "
                                 "script names it in its first line, a program in `readelf -l " +
                                 lost + "`)\n");
  EXPECT_EQ(run({lost}).code, 3);
}
}  // namespace
