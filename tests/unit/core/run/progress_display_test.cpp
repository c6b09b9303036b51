// The text of the progress display; train_display_test shows it on a terminal.
#include "run/progress_display.hpp"

#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <limits>
#include <regex>

#include "base/log.hpp"

namespace zr::host {
namespace {

std::string without_colours(const std::string& text) {
  return std::regex_replace(text, std::regex("\033\\[[0-9]*m"), "");
}

run::StepProgress offloaded_step() {
  return {120,
          1200,
          2.34567,
          1e-3,
          5606,
          123,
          {1 << 20, 2 << 20, 3LL << 30},
          {{"compute", 49}, {"communication", 1}, {"disk_read", 0.2}, {"disk_write", 30}, {"optimizer", 19.8}},
          4LL << 30,
          false,
          0};
}

TEST(ProgressDisplayTest, LineHasEveryField) {
  EXPECT_EQ(
      progress_line(offloaded_step()),
      "step 120/1200  loss 2.3457  lr 1.00e-03  5606 tokens/s  left 2m 03s  memory device 1.00 MiB, host 2.00 "
      "MiB, disk 3.00 GiB  waits: compute 49 %, communication 1 %, disk_write 30 %, optimizer 20 %  written 4.00 GiB");
  run::StepProgress skipped = offloaded_step();
  skipped.skipped = true;
  skipped.loss_scale = 256;
  skipped.loss = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(progress_line(skipped).find("loss nan  "), std::string::npos);
  EXPECT_NE(progress_line(skipped).find("  (skipped: gradients not finite, loss scale 256)"), std::string::npos);
}

TEST(ProgressDisplayTest, WideTerminalShowsBarAndEveryField) {
  EXPECT_EQ(
      progress_on_terminal(offloaded_step(), 240, false),
      "[##..........................] 120/1200   10 %  loss 2.3457  left 2m 03s  5606 tokens/s  device 1.00 MiB  "
      "host 2.00 MiB  disk 3.00 GiB  waits: compute 49 %, communication 1 %, disk_write 30 %, optimizer 20 %  written "
      "4.00 GiB  lr 1.00e-03");
}

TEST(ProgressDisplayTest, NarrowTerminalShowsTheLargestWaits) {
  EXPECT_EQ(progress_on_terminal(offloaded_step(), 160, false),
            "[##......................] 120/1200   10 %  loss 2.3457  left 2m 03s  5606 tokens/s  device 1.00 MiB  "
            "host 2.00 MiB  disk 3.00 GiB  waits: compute 49 %");
  EXPECT_EQ(progress_on_terminal(offloaded_step(), 40, false), "[........] 120/1200   10 %  loss 2.3457");
}

TEST(ProgressDisplayTest, NoWidthWraps) {
  run::StepProgress skipped = offloaded_step();
  skipped.skipped = true;
  for (const run::StepProgress& now : {offloaded_step(), skipped, run::StepProgress{}})
    for (int columns = 0; columns <= 300; ++columns) {
      const std::string plain = progress_on_terminal(now, columns, false);
      EXPECT_LE(static_cast<int>(plain.size()), std::max(columns - 1, 0)) << plain;
      EXPECT_EQ(without_colours(progress_on_terminal(now, columns, true)), plain);
    }
}

TEST(ProgressDisplayTest, ColoursTheBarAndTheSkippedStep) {
  run::StepProgress now = offloaded_step();
  now.skipped = true;
  const std::string text = progress_on_terminal(now, 120, true);
  EXPECT_EQ(text.rfind("\033[32m[#.", 0), 0u) << text;
  EXPECT_NE(text.find("\033[33m(skipped: gradients not finite)\033[0m"), std::string::npos) << text;
}

const std::string kBegin = "\r\033[2K\033[2K";

TEST(ProgressDisplayTest, LastBarStays) {
  ::setenv("ZR_PROGRESS", "tty", 1);
  ::setenv("NO_COLOR", "1", 1);
  run::StepProgress last = offloaded_step();
  last.step = last.steps;
  ::testing::internal::CaptureStdout();
  {
    run::ProgressDisplay display(true);
    display.show(offloaded_step());
    display.show(last);
    display.note("validation loss 3");
  }
  const std::string seen = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(seen.substr(seen.find('\n')), "\n\r\033[Kvalidation loss 3\n") << seen;
  EXPECT_EQ(seen.find("\033[0K" + kBegin + "["), seen.rfind(kBegin) - 4) << seen;
  ::unsetenv("ZR_PROGRESS");
  ::unsetenv("NO_COLOR");
}

TEST(ProgressDisplayTest, WidthFollowsTheTerminal) {
  winsize size{};
  size.ws_col = 100;
  int master = -1, terminal = -1;
  ASSERT_EQ(::openpty(&master, &terminal, nullptr, nullptr, &size), 0);
  ::setenv("ZR_PROGRESS", (std::string("tty:") + ::ttyname(terminal)).c_str(), 1);
  ::setenv("NO_COLOR", "1", 1);
  ::testing::internal::CaptureStdout();
  {
    run::ProgressDisplay display(true);
    display.show(offloaded_step());
    size.ws_col = 30;
    ASSERT_EQ(::ioctl(master, TIOCSWINSZ, &size), 0);
    display.show(offloaded_step());
    display.note("a line of its own");
  }
  EXPECT_EQ(::testing::internal::GetCapturedStdout(),
            kBegin + progress_on_terminal(offloaded_step(), 100, false) + "\033[0K" + kBegin +
                progress_on_terminal(offloaded_step(), 30, false) + "\033[0K" + "\r\033[Ka line of its own\n");
  ::unsetenv("ZR_PROGRESS");
  ::unsetenv("NO_COLOR");
  ::close(terminal);
  ::close(master);
}

// The bar is on standard output and log lines are on standard error, as if both were one terminal.
TEST(ProgressDisplayTest, LogLinesAreWrittenAboveTheBar) {
  int master = -1, terminal = -1;
  winsize size{};
  size.ws_col = 100;
  ASSERT_EQ(::openpty(&master, &terminal, nullptr, nullptr, &size), 0);
  ::setenv("ZR_PROGRESS", (std::string("tty:") + ::ttyname(terminal)).c_str(), 1);
  ::setenv("NO_COLOR", "1", 1);
  ::testing::internal::CaptureStdout();
  const int standard_error = ::dup(STDERR_FILENO);
  ASSERT_EQ(::dup2(STDOUT_FILENO, STDERR_FILENO), STDERR_FILENO);
  {
    run::ProgressDisplay display(true);
    log(ZR_LOG_WARN, "before the first bar");
    display.show(offloaded_step());
    log(ZR_LOG_WARN, "step 4 skipped");
    display.note("a line of its own");
    log(ZR_LOG_WARN, "no bar");
    display.show(offloaded_step());
  }
  log(ZR_LOG_WARN, "after the display");
  ASSERT_EQ(::dup2(standard_error, STDERR_FILENO), STDERR_FILENO);
  ::close(standard_error);
  const std::string bar = progress_on_terminal(offloaded_step(), 100, false) + "\033[0K";
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "zeroth: warning: before the first bar\n" + kBegin + bar +
                                                          "\r\033[Kzeroth: warning: step 4 skipped\n" + bar +
                                                          "\r\033[Ka line of its own\nzeroth: warning: no bar\n" +
                                                          kBegin + bar + "\nzeroth: warning: after the display\n");
  ::unsetenv("ZR_PROGRESS");
  ::unsetenv("NO_COLOR");
  ::close(terminal);
  ::close(master);
}

}  // namespace
}  // namespace zr::host
