#include "conform/conform.hpp"

#include <algorithm>
#include <optional>

#include "conform/library.hpp"

namespace zr::conform {

namespace {

struct ComponentName {
  std::string role, id;
  std::string text() const { return concat(role, " '", id, "'"); }
};

// The components of the library, read in another process.
std::vector<ComponentName> components_of(const Options& options) {
  const Outcome outcome = run_in_process(
      [&](const Note&) {
        const zr_module* module = Library(options.file).module();
        std::string names;
        for (uint32_t i = 0; i < module->n_components; ++i)
          names += concat(role_of_kind(module->components[i]->kind), " ", module->components[i]->id, "\n");
        return names;
      },
      options.time_limit);
  std::vector<ComponentName> components;
  std::istringstream lines(outcome.output);
  for (ComponentName one; lines >> one.role >> one.id;) components.push_back(one);
  return components;
}

bool is_selected(const Options& options, const Rule& rule) {
  return options.rules.empty() || std::find(options.rules.begin(), options.rules.end(), rule.id) != options.rules.end();
}

class Check {
 public:
  Check(const Options& options, const std::function<void(const Result&)>& on_result)
      : on_result_(on_result), report_{options, {}} {}

  Report run() {
    for (const Rule& rule : rules()) {
      if (!is_selected(report_.options, rule)) continue;
      if (!rule.per_component) {
        add(rule, {});
        continue;
      }
      if (!components_ && !failed_gate(rule, "")) components_ = components_of(report_.options);
      if (components_)
        for (const ComponentName& component : *components_)
          if (rule.role.empty() || rule.role == component.role) add(rule, component);
    }
    return std::move(report_);
  }

 private:
  // The gate of an earlier level that failed for the library or the component, or null.
  const Rule* failed_gate(const Rule& rule, const std::string& component) const {
    for (const Result& result : report_.results)
      if (result.outcome.verdict == Verdict::fail && result.rule->gate && result.rule->level < rule.level &&
          (result.component.empty() || result.component == component))
        return result.rule;
    return nullptr;
  }

  void add(const Rule& rule, const ComponentName& component) {
    Result result{&rule, rule.per_component ? component.text() : "", {}};
    if (const Rule* gate = failed_gate(rule, result.component))
      result.outcome = {Verdict::skip, concat("it cannot be checked, because ", gate->id, " failed"), ""};
    else
      result.outcome = run_case(rule, component);
    report_.results.push_back(result);
    if (on_result_) on_result_(result);
  }

  Outcome run_case(const Rule& rule, const ComponentName& component) const {
    const Options& options = report_.options;
    uint64_t stream = options.seed;  // differs between rules
    for (const char c : rule.id) stream = stream * 131 + static_cast<unsigned char>(c);
    return run_in_process(
        [&](const Note& note) {
          Case test(options.file, component.role, component.id, stream, options.values);
          test.on_note = note;
          rule.check(test);
          return test.remark();
        },
        rule.level == Level::load ? std::min(options.time_limit, 10.0) : options.time_limit);
  }

  const std::function<void(const Result&)>& on_result_;
  Report report_;
  std::optional<std::vector<ComponentName>> components_;
};

}  // namespace

Report check_library(const Options& options, const std::function<void(const Result&)>& on_result) {
  Report report = Check(options, on_result).run();
  remove_temporary_folders();
  return report;
}

int Report::count(Verdict verdict) const {
  return static_cast<int>(std::count_if(results.begin(), results.end(),
                                        [&](const Result& result) { return result.outcome.verdict == verdict; }));
}

}  // namespace zr::conform
