// Checks a plug-in library against the rules, one process per case.
#pragma once

#include <filesystem>
#include <iosfwd>
#include <string>
#include <vector>

#include "conform/case.hpp"
#include "conform/process.hpp"
#include "conform/rule.hpp"

namespace zr::conform {

struct Options {
  std::filesystem::path file;
  std::vector<std::string> rules{};  // check these rules only; empty: all
  uint64_t seed = 1;                 // of the random cases
  double time_limit = 60;            // seconds per case
  KeyTexts values;                   // of keys, as TOML text
};

/// The result of one case.
struct Result {
  const Rule* rule;
  std::string component;  // "optimizer 'lion'"; "" for a rule about the library
  Outcome outcome;
};
struct Report {
  Options options;
  std::vector<Result> results;
  /// The number of cases with this verdict.
  int count(Verdict verdict) const;
  /// True if no rule failed, and at least one passed.
  bool passed() const { return count(Verdict::fail) == 0 && count(Verdict::pass) > 0; }
};

/// Why the options cannot be used with their file: there is no such file, it has no such key, the value of a key is
/// not one of its values, a rule is about a role that the file does not have. "" if they can.
std::string usage_problem(const Options& options);

/// Checks the library; calls `on_result` after each case. The process must have one thread, and must not have loaded
/// the library. Throws std::system_error if the machine has no processes or pipes left.
Report check_library(const Options& options, const std::function<void(const Result&)>& on_result = {});

/// "pass  ZR-L02  sentence" and, if it did not pass, a line with the reason.
std::string text_of(const Result& result);
/// "58 passed, 1 failed, 3 skipped; seed 1"; says so if nothing was checked.
std::string summary_of(const Report& report);
/// The report as JSON: file, seed, counts and one object per case.
std::string json_of(const Report& report);
/// The list of rules, as `zeroth conform --list` prints it.
std::string list_of_rules();

}  // namespace zr::conform
