// Results as text and JSON.
#include <array>
#include <nlohmann/json.hpp>

#include "conform/conform.hpp"

namespace zr::conform {

namespace {
constexpr std::array kVerdicts{"pass", "FAIL", "skip"}, kJsonVerdicts{"passed", "failed", "skipped"};
std::size_t index_of(Verdict verdict) { return static_cast<std::size_t>(verdict); }
}  // namespace

std::string text_of(const Result& result) {
  const auto& [rule, component, outcome] = result;
  std::string text = concat(kVerdicts[index_of(outcome.verdict)], "  ", rule->id, "  ",
                            component.empty() ? "" : component + ": ", rule->sentence, "\n");
  const std::string& comment = outcome.verdict == Verdict::pass ? outcome.output : outcome.reason;
  if (!comment.empty()) text += concat("              ", comment, "\n");
  return text;
}

std::string summary_of(const Report& report) {
  const int passed = report.count(Verdict::pass), failed = report.count(Verdict::fail);
  return concat(passed, " passed, ", failed, " failed, ", report.count(Verdict::skip), " skipped; seed ",
                report.options.seed, passed + failed == 0 ? "; nothing was checked (exit code 2)\n" : "\n");
}

std::string json_of(const Report& report) {
  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  for (const auto& [rule, component, outcome] : report.results) {
    nlohmann::ordered_json one{{"rule", rule->id}};
    if (!component.empty()) one["component"] = component;
    one["result"] = kJsonVerdicts[index_of(outcome.verdict)];
    if (outcome.verdict != Verdict::pass)
      one["reason"] = outcome.reason;
    else if (!outcome.output.empty())
      one["remark"] = outcome.output;
    cases.push_back(std::move(one));
  }
  const nlohmann::ordered_json all{{"file", report.options.file.string()},   {"seed", report.options.seed},
                                   {"passed", report.count(Verdict::pass)},  {"failed", report.count(Verdict::fail)},
                                   {"skipped", report.count(Verdict::skip)}, {"cases", std::move(cases)}};
  return all.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string list_of_rules() {
  std::string text;
  for (const Rule& rule : rules()) {
    const std::string role(rule.role.empty() ? "all" : rule.role);
    text += concat(rule.id, "  ", role, std::string(14 - role.size(), ' '), rule.sentence, "\n");
  }
  return text;
}

}  // namespace zr::conform
