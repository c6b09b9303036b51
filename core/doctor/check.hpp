// The lines of `zeroth doctor`: what was checked, the verdict, one sentence, and the command that fixes a problem.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace zr::host::doctor {

/// A warning does not prevent a job: it is slower, or one part of Zeroth cannot be used. A problem prevents a job.
enum class Verdict { ok, warning, problem };
std::string_view name_of(Verdict verdict);  // "ok"

/// One line of the report.
struct Check {
  std::string topic, name;  // "memory", "huge pages"
  Verdict verdict = Verdict::ok;
  std::string message;    // one sentence with the measured numbers; if there is no command, with the remedy
  std::string command{};  // of a shell; empty if the verdict is ok, or if no command fixes it
  /// Replaces the verdict and the command, and adds to the message.
  void worsen(Verdict to, const std::string& more, const std::string& fix = "") {
    verdict = to;
    message += more;
    command = fix;
  }
};
using Checks = std::vector<Check>;

/// What `zeroth doctor` prints.
struct Report {
  std::string zeroth, abi;  // versions: "0.1.0", "0.9"
  Checks checks{};
  /// The number of checks with this verdict.
  int count(Verdict verdict) const;
};

/// The report as text: a heading per topic, a line per check, the command below it, and a summary.
std::string text_of(const Report& report);
/// The report as JSON; docs/command-line.md has the schema.
std::string json_of(const Report& report);
/// `command`, preceded by "sudo " if it needs root and this user is not root.
std::string as_root(std::string_view command, bool is_root);
/// "1 rank", "4 ranks".
std::string count_text(int64_t n, std::string_view singular);

}  // namespace zr::host::doctor
