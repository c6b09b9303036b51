#include "run/stop_signal.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>

#include "control/control.hpp"

namespace zr::host {
namespace {

bool handled(int signal) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler != SIG_DFL;
}

TEST(StopSignalTest, IsRecordedUntilTheLastEngineOfTheProcessEnds) {
  const auto control = control::Control::join();  // this process alone
  const auto said = [&] { return control->get(control::saves_on_signal_key(0), std::chrono::seconds(1)); };
  auto first = std::make_unique<run::StopSignal>(control, true);
  auto second = std::make_unique<run::StopSignal>(control, true);
  EXPECT_EQ(said(), "yes");
  first.reset();
  EXPECT_EQ(said(), "yes");
  ASSERT_TRUE(handled(SIGTERM) && handled(SIGINT));
  ::raise(SIGTERM);
  EXPECT_EQ(second->received(), SIGTERM);
  EXPECT_EQ(run::StopSignal(control, false).received(), 0);
  first = std::make_unique<run::StopSignal>(control, true);
  second.reset();
  EXPECT_EQ(said(), "yes");
  ASSERT_TRUE(handled(SIGTERM) && handled(SIGINT));
  first->disable();
  EXPECT_EQ(said(), "no");
  EXPECT_FALSE(handled(SIGTERM) || handled(SIGINT));
  first.reset();
  EXPECT_FALSE(handled(SIGTERM) || handled(SIGINT));
}

// A process that loads data shall end by the signals that a launcher sends.
TEST(StopSignalTest, SignalsEndChildrenOfTheRank) {
  const auto control = control::Control::join();
  const run::StopSignal enabled(control, true);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::raise(SIGTERM);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
  EXPECT_TRUE(handled(SIGTERM));
}

TEST(StopSignalTest, DoesNothingWhileItIsDisabled) {
  const auto control = control::Control::join();
  const run::StopSignal disabled(control, false);
  EXPECT_FALSE(disabled.enabled());
  EXPECT_FALSE(handled(SIGTERM) || handled(SIGINT));
  EXPECT_EQ(disabled.received(), 0);
}

TEST(StopSignalTest, TakesTheUserSignalsOfALauncher) {
  const auto control = control::Control::join();
  ::setenv("ZR_USER_SIGNALS", "stop", 1);
  {
    const run::StopSignal enabled(control, true);
    ASSERT_TRUE(handled(SIGUSR1) && handled(SIGUSR2));
    ::raise(SIGUSR2);
    EXPECT_EQ(enabled.received(), SIGINT);
    ::raise(SIGUSR1);
    EXPECT_EQ(enabled.received(), SIGTERM);
  }
  EXPECT_FALSE(handled(SIGUSR1) || handled(SIGUSR2));
  ::unsetenv("ZR_USER_SIGNALS");
  const run::StopSignal without_launcher(control, true);
  EXPECT_FALSE(handled(SIGUSR1) || handled(SIGUSR2));
}

}  // namespace
}  // namespace zr::host
