// What `zeroth train` shows of a run, on a pseudo-terminal and off it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

class ZerothTrain : public testing::Test {
 protected:
  std::string command(const std::string& overrides) const {
    return ZR_BUILD_DIR "/bin/zeroth train " ZR_SOURCE_DIR
                        "/examples/quickstart/quickstart.toml train.steps=3 job.ranks=1 job.threads=1 job.runs=" +
           scratch_.folder().string() + " " + overrides;
  }
  // The output of `zeroth train` on a terminal with this many columns. `environment`: "TERM=xterm NO_COLOR=1".
  std::string on_terminal(int columns, const std::string& environment, const std::string& overrides = "") const {
    winsize size{};
    size.ws_row = 24;
    size.ws_col = static_cast<unsigned short>(columns);
    int master = -1;
    const std::string line = "env -u NO_COLOR " + environment + " " + command(overrides);
    const pid_t pid = ::forkpty(&master, nullptr, nullptr, &size);
    if (pid == 0) {
      ::execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
      ::_exit(127);
    }
    EXPECT_GT(pid, 0);
    std::string seen;
    char buffer[4096];
    for (ssize_t n; (n = ::read(master, buffer, sizeof buffer)) > 0;) seen.append(buffer, static_cast<std::size_t>(n));
    int status = 0;
    ::waitpid(pid, &status, 0);
    ::close(master);
    EXPECT_EQ(WEXITSTATUS(status), 0) << seen;
    return seen;
  }
  // The states of the line that is redrawn, without colours.
  static std::vector<std::string> drawn(const std::string& seen) {
    const std::string clear = "\r\033[2K\033[2K";
    std::vector<std::string> states;
    for (auto at = seen.find(clear); at != seen.npos;) {
      const auto next = seen.find(clear, at + 1);
      std::string state = seen.substr(at + clear.size(), next == seen.npos ? next : next - at - clear.size());
      state.resize(std::min(state.size(), state.find_first_of("\r\n")));
      states.push_back(std::regex_replace(state, std::regex("\033\\[[0-9]*[mK]"), ""));
      at = next;
    }
    return states;
  }
  double last_loss() const {
    return nlohmann::json::parse(std::ifstream(scratch_.path("quickstart/summary.json"))).at("loss").get<double>();
  }
  const zr::test::Scratch scratch_;
};

TEST_F(ZerothTrain, ShowsBarOnTerminal) {
  const std::string seen = on_terminal(220, "TERM=xterm", "offload.optimizer=cpu");
  const auto states = drawn(seen);
  ASSERT_GE(states.size(), 2u) << seen;
  EXPECT_THAT(states.front(), ContainsRegex("^\\[#########\\.+\\] 1/3   33 %  loss [0-9.]+  left [0-9.]+s  "));
  char loss[32];
  std::snprintf(loss, sizeof loss, "  loss %.4f  ", last_loss());
  const std::string& last = states.back();
  EXPECT_THAT(last, ContainsRegex("^\\[############################\\] 3/3  100 %  "));
  EXPECT_THAT(last, HasSubstr(loss));
  EXPECT_THAT(last, ContainsRegex("  [0-9]+ samples/s  device [0-9.]+ [KM]iB  host [0-9.]+ [KM]iB  waits: compute "));
  EXPECT_THAT(last, HasSubstr("  lr 1.00e-03"));
  EXPECT_THAT(seen, HasSubstr("\r\033[2K\033[2K\033[32m[")) << "the bar is green";
}

TEST_F(ZerothTrain, NeverWrapsBar) {
  for (const int columns : {12, 40, 80, 120}) {
    const auto states = drawn(on_terminal(columns, "TERM=xterm"));
    ASSERT_GE(states.size(), 2u) << columns;
    for (const std::string& state : states) EXPECT_LT(static_cast<int>(state.size()), columns) << state;
    EXPECT_THAT(states.back(), HasSubstr("3/3")) << columns;
  }
}

TEST_F(ZerothTrain, ShowsNoColoursWithNoColor) {
  const std::string seen = on_terminal(120, "TERM=xterm NO_COLOR=1");
  EXPECT_THAT(seen, HasSubstr("\r\033[2K\033[2K[###")) << "the bar is still redrawn";
  EXPECT_THAT(seen, Not(ContainsRegex("\033\\[[0-9]*m")));
  EXPECT_THAT(on_terminal(120, "TERM=xterm NO_COLOR="), HasSubstr("\033[32m")) << "an empty NO_COLOR has no effect";
}

TEST_F(ZerothTrain, PrintsLinesOnDumbTerminal) {
  const std::string seen = on_terminal(120, "TERM=dumb");
  EXPECT_THAT(seen, Not(HasSubstr("\033")));
  EXPECT_THAT(seen, HasSubstr("\nstep 3/3  loss "));
}

TEST_F(ZerothTrain, PrintsLinesIfOutputIsNoTerminal) {
  const auto result = zr::testing::shell("TERM=xterm " + command(""));
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output, Not(HasSubstr("\033")));
  EXPECT_THAT(result.output, Not(HasSubstr("\r")));
  char loss[64];
  std::snprintf(loss, sizeof loss, "\nstep 3/3  loss %.4f  lr 1.00e-03  ", last_loss());
  EXPECT_THAT(result.output, HasSubstr(loss));
  EXPECT_THAT(result.output, HasSubstr("  memory device "));
}

TEST_F(ZerothTrain, TrainsWithoutStandardFiles) {
  const auto result = zr::testing::shell("(exec " + command("") + " <&- >&- 2>&-)");
  EXPECT_EQ(result.code, 0);
  EXPECT_TRUE(std::isfinite(last_loss())) << "the job has trained to its end";
}

// tests/multirank/comm has ranks of mpirun.
TEST_F(ZerothTrain, SLOW_IsARankIfAnotherLauncherHasStartedSeveral) {
  const std::string port = std::to_string(20000 + ::getpid() % 10000);
  const std::string slurm = "SLURM_JOB_ID=" + port + " SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 SLURM_PROCID=$rank ";
  const std::string torchrun = "RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 ";
  const auto train = [&](const std::string& ranks, const std::string& variables) {
    const auto done = zr::testing::shell("for rank in " + ranks + "; do " + variables + command("job.ranks=2") +
                                         " & all=\"$all $!\"; done; for one in $all; do wait $one || exit; done");
    EXPECT_EQ(done.code, 0) << done.output;
    EXPECT_THAT(done.output, HasSubstr("parameters, fp32, 2 ranks, bytes of rank 0"));
    const auto lines = done.lines();
    EXPECT_EQ(std::count_if(lines.begin(), lines.end(), [](const auto& line) { return line.starts_with("step 3/3"); }),
              1)
        << done.output;
  };
  train("0 1", torchrun + "MASTER_PORT=" + port + " ");
  train("0 1", slurm + "SLURM_STEP_NUM_TASKS=2 ");
  train("0", slurm + "SLURM_STEP_NUM_TASKS=1 ");  // a shell in a step: the job starts its own two ranks
}

TEST_F(ZerothTrain, SLOW_WaitsForOtherRanksAsLongAsTheJobPermits) {
  const auto done =
      zr::testing::shell("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" +
                         std::to_string(20000 + ::getpid() % 10000) + " " + command("communicator.timeout=62s"));
  EXPECT_EQ(done.code, 4);
  EXPECT_THAT(done.output, HasSubstr("not all ranks have joined within 1m 02s; rank 1 has not joined"));
}

// Such as in a shell of `srun --pty`, or as one of its tasks: the program that it asks for its parameters must not wait
// for other ranks.
TEST(ZerothPlan, DoesNotJoinAJobOfTheLauncherThatHasStartedIt) {
  for (const std::string variables :
       {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1",
        "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 "
        "SLURM_STEP_NODELIST=gpu[07-08]"}) {
    const auto done =
        zr::testing::shell("timeout 30 env " + variables +
                           " " ZR_BUILD_DIR "/bin/zeroth plan " ZR_SOURCE_DIR "/examples/quickstart/quickstart.toml");
    EXPECT_EQ(done.code, 0) << done.output;
    EXPECT_THAT(done.output, HasSubstr("parameters, fp32"));
  }
}

}  // namespace
