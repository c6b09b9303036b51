#include "control/failure_report.hpp"

#include <fmt/format.h>

#include <set>

#include "base/text.hpp"

namespace zr::host::control {

namespace {
constexpr std::size_t kMaxLines = 64;
}  // namespace

std::string failure_report_text(const std::string& headline, const std::vector<ReportLine>& lines) {
  std::set<std::string> hosts;
  std::size_t rank_width = 0, pid_width = 0, host_width = 0;
  for (const auto& line : lines) {
    if (!line.host.empty()) hosts.insert(line.host);
    rank_width = std::max(rank_width, fmt::formatted_size("{}", line.rank));
    pid_width = std::max(pid_width, fmt::formatted_size("{}", line.pid));
    host_width = std::max(host_width, line.host.size());
  }
  std::string text = headline;
  for (std::size_t i = 0; i < lines.size() && i < kMaxLines; ++i) {
    const ReportLine& line = lines[i];
    const std::string pid = line.pid ? fmt::format("{}", line.pid) : "-";
    text += fmt::format("\n  rank {:<{}}  pid {:<{}}", line.rank, rank_width, pid, pid_width);
    if (hosts.size() > 1) text += fmt::format("  {:<{}}", line.host, host_width);
    text += fmt::format("  {}", line.state);
  }
  if (lines.size() > kMaxLines) text += fmt::format("\n  and {} more ranks", lines.size() - kMaxLines);
  return text;
}

std::string activity_text(const Activity& activity, int64_t age_ms) {
  const std::string age = duration_text(static_cast<double>(age_ms) / 1000);
  const std::string what = activity.what.empty() ? "computing" : activity.what;
  std::string text = activity.waiting ? fmt::format("waits {} in {}", age, what) : fmt::format("{} for {}", what, age);
  if (activity.sequence > 0)
    text += fmt::format(", {}collective {}", activity.waiting ? "" : "after ", activity.sequence);
  return fmt::format("{}, step {}", text, activity.step);
}

std::string left_text(const protocol::Heartbeat& heartbeat) {
  return fmt::format("ended {} after step {}", heartbeat.failed ? "by an exception" : "normally", heartbeat.left_step);
}

std::string left_while_awaited_text(const protocol::Heartbeat& heartbeat) {
  if (heartbeat.failed) return left_text(heartbeat);
  return heartbeat.exited ? fmt::format("exited after step {} (at the end of main, or by exit)", heartbeat.left_step)
                          : fmt::format("ended after step {} (ran out of data?)", heartbeat.left_step);
}

std::string exit_status_text(const ExitStatus& exit_status) {
  std::string text = fmt::format("ended with exit code {}", exit_status.code);
  if (exit_status.signal) {
    const char* name = sigabbrev_np(exit_status.signal);
    text = fmt::format("was killed by signal {}{}", exit_status.signal, name ? fmt::format(" (SIG{})", name) : "");
  }
  return exit_status.note.empty() ? text : fmt::format("{}: {}", text, exit_status.note);
}

std::string process_state_text(char state) {
  switch (state) {
    case 'T': return "stopped (T)";
    case 't': return "stopped by a debugger (t)";
    case 'D': return "in an uninterruptible system call (D)";
    case 'R': return "running (R)";
    case 'S': return "sleeping (S)";
    case 'Z':
    case 'X': return "dead (Z)";
    case 0: return "";
    default: return fmt::format("in state {}", state);
  }
}

std::string rank_text(int rank, int64_t pid) {
  return fmt::format("rank {}{}", rank, pid ? fmt::format(" (pid {})", pid) : "");
}

}  // namespace zr::host::control
