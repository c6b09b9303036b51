// The report of a broken job: a headline and a line per rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "control/protocol.hpp"

namespace zr::host {

/// How a rank's process ended, as its parent saw it.
struct ExitStatus {
  int code = 0;      // exit code, if signal is 0
  int signal = 0;    // that killed it
  std::string note;  // more about it, or ""
  bool good() const { return code == 0 && signal == 0; }
};

struct ReportLine {
  int rank = 0;
  int64_t pid = 0;  // 0: not known
  std::string host;
  std::string state;
};

/// Hosts are shown if there is more than one.
std::string failure_report_text(const std::string& headline, const std::vector<ReportLine>& lines);

/// "waits 0.3s in all_reduce 'gradient bucket 3' (fp32, 4194304), collective 71, step 12"; `age_ms` is the time in it.
std::string activity_text(const Activity& activity, int64_t age_ms);
/// How a rank left: "ended in order after step 5", "ended by an exception after step 5"; and the same where another
/// rank waits for it: "ended after step 5 (its data ended?)".
std::string left_text(const protocol::Heartbeat& heartbeat);
std::string left_while_awaited_text(const protocol::Heartbeat& heartbeat);
/// "was killed by signal 9 (SIGKILL)", "ended with exit code 2".
std::string exit_status_text(const ExitStatus& exit_status);
/// "stopped (T)"; "" if there is no such process.
std::string process_state_text(char state);
/// "rank 1 (pid 4242)", "rank 1" if the pid is not known.
std::string rank_text(int rank, int64_t pid);

}  // namespace zr::host
