// The failure report: a headline and one line per rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "control/protocol.hpp"

namespace zr::host::control {

/// How a rank's process ended, as its parent saw it.
struct ExitStatus {
  int code = 0;      // exit code, if signal is 0
  int signal = 0;    // the signal that killed the process; 0: it exited
  std::string note;  // additional information, or ""
  int64_t step = 0;  // that the rank was making, as its StepBoard says; 0: not known
  bool good() const { return code == 0 && signal == 0; }
};

struct ReportLine {
  int rank = 0;
  int64_t pid = 0;  // 0: unknown
  std::string host;
  std::string state;
};

/// The text of the report. Host names are included if the job has more than one node.
std::string failure_report_text(const std::string& headline, const std::vector<ReportLine>& lines);

/// "waits 0.3s in all_reduce 'gradient bucket 3' (fp32, 4194304), collective 71, step 12"; `age_ms`: how
/// long the activity has lasted.
std::string activity_text(const Activity& activity, int64_t age_ms);
/// How a rank left: "ended normally after step 5", "ended by an exception after step 5"; and the same if another
/// rank waits for this rank: "ended after step 5 (ran out of data?)", "exited after step 5 (at the end of main,
/// or by exit)".
std::string left_text(const protocol::Heartbeat& heartbeat);
std::string left_while_awaited_text(const protocol::Heartbeat& heartbeat);
/// "was killed by signal 9 (SIGKILL)", "ended with exit code 2".
std::string exit_status_text(const ExitStatus& exit_status);
/// "stopped (T)"; "" if the process does not exist.
std::string process_state_text(char state);
/// "rank 1 (pid 4242)", "rank 1" if the pid is unknown.
std::string rank_text(int rank, int64_t pid);

}  // namespace zr::host::control
