#include "engine/stop_signal.hpp"

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <memory>
#include <string>

#include "control/control.hpp"

namespace zr::host {
namespace {

TEST(StopSignalTest, IsRecordedUntilTheLastEngineOfTheProcessEnds) {
  const auto control = control::Control::join();  // this process alone
  const auto said = [&] { return control->get(control::saves_on_signal_key(0), std::chrono::seconds(1)); };
  const auto handled = [](int signal) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    return action.sa_handler != SIG_DFL;
  };
  auto first = std::make_unique<engine::StopSignal>(control), second = std::make_unique<engine::StopSignal>(control);
  EXPECT_EQ(said(), "yes");
  first.reset();
  EXPECT_EQ(said(), "yes");
  ASSERT_TRUE(handled(SIGTERM) && handled(SIGINT));
  ::raise(SIGTERM);
  EXPECT_EQ(engine::StopSignal::received(), SIGTERM);
  first = std::make_unique<engine::StopSignal>(control);
  second.reset();
  EXPECT_EQ(said(), "yes");
  ASSERT_TRUE(handled(SIGTERM) && handled(SIGINT));
  first.reset();
  EXPECT_EQ(said(), "no");
  EXPECT_FALSE(handled(SIGTERM) || handled(SIGINT));
}

}  // namespace
}  // namespace zr::host
