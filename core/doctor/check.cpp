#include "doctor/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.hpp"

namespace zr::host::doctor {

std::string_view name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::ok: return "ok";
    case Verdict::warning: return "warning";
    default: return "problem";
  }
}

int Report::count(Verdict verdict) const {
  return static_cast<int>(
      std::count_if(checks.begin(), checks.end(), [&](const Check& check) { return check.verdict == verdict; }));
}

std::string count_text(int64_t n, std::string_view singular) {
  return fmt::format("{} {}{}", n, singular, n == 1 ? "" : "s");
}

std::string text_of(const Report& report) {
  std::string text = fmt::format("zeroth {}, plug-in ABI {}\n", report.zeroth, report.abi), topic;
  for (const Check& check : report.checks) {
    if (check.topic != topic) text += fmt::format("\n{}\n", check.topic);
    topic = check.topic;
    text += fmt::format("  {:7}  {}: {}\n", name_of(check.verdict), printable(check.name), printable(check.message));
    if (!check.command.empty()) text += fmt::format("           fix: {}\n", printable(check.command));
  }
  const int problems = report.count(Verdict::problem), warnings = report.count(Verdict::warning);
  return text + fmt::format("\n{}, {}\n", problems ? count_text(problems, "problem") : "no problems",
                            warnings ? count_text(warnings, "warning") : "no warnings");
}

std::string json_of(const Report& report) {
  nlohmann::ordered_json checks = nlohmann::ordered_json::array();
  for (const Check& check : report.checks)
    checks.push_back({{"topic", check.topic},
                      {"name", check.name},
                      {"verdict", name_of(check.verdict)},
                      {"message", check.message},
                      {"command", check.command}});
  const nlohmann::ordered_json all{{"zeroth", report.zeroth},
                                   {"abi", report.abi},
                                   {"checks", std::move(checks)},
                                   {"problems", report.count(Verdict::problem)},
                                   {"warnings", report.count(Verdict::warning)}};
  return all.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string as_root(std::string_view command, bool is_root) {
  return fmt::format("{}{}", is_root ? "" : "sudo ", command);
}

}  // namespace zr::host::doctor
