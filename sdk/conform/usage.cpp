// Whether options fit the file that they are about.
#include <algorithm>
#include <set>
#include <system_error>

#include "conform/conform.hpp"
#include "conform/library.hpp"

namespace zr::conform {

namespace {

std::string joined(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string problem_of_file(const std::string& file) {
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  if (!std::filesystem::exists(status)) return concat(file, ": there is no such file; name the .so file of a plug-in");
  if (std::filesystem::is_directory(status)) return concat(file, ": it is a folder; name the .so file of a plug-in");
  if (!std::filesystem::is_regular_file(status))
    return concat(file, ": it is not a regular file; name the .so file of a plug-in");
  return "";
}

std::string problem_of_rules(const Options& options, const zr_module& module) {
  std::set<std::string> roles;
  for (uint32_t i = 0; i < module.n_components; ++i) roles.insert(role_of_kind(module.components[i]->kind));
  for (const std::string& id : options.rules) {
    const Rule* const rule = find_rule(id);
    if (!rule || rule->role.empty() || roles.count(std::string(rule->role))) continue;
    return concat("--rule ", id, ": this rule is about a component of the role ", rule->role, ", but ",
                  options.file.string(), " has the roles: ", joined(roles), "; --list prints the role of each rule");
  }
  return "";
}

// Every component that has the key must accept the value.
std::string problem_of_values(const Options& options, const zr_module& module) {
  for (const auto& [name, text] : options.values) {
    std::set<std::string> names;
    for (uint32_t i = 0; i < module.n_components; ++i) {
      const zr_component& component = *module.components[i];
      for (uint32_t k = 0; k < component.n_keys; ++k) {
        const zr_key& key = *component.keys[k];
        names.insert(key.name);
        if (key.name != name) continue;
        if (const std::string problem = value_problem(key, text); !problem.empty())
          return concat("--set ", name, "=", text, ": ", problem, "; the key '", name, "' is of ",
                        role_of_kind(component.kind), " '", component.id, "' in ", options.file.string());
      }
    }
    if (!names.count(name))
      return concat("--set ", name, "=", text, ": ", options.file.string(), " has no key '", name, "'; ",
                    names.empty() ? "it has no keys" : "its keys are " + joined(names));
  }
  return "";
}

}  // namespace

std::string usage_problem(const Options& options) {
  if (std::string problem = problem_of_file(options.file.string()); !problem.empty()) return problem;
  const bool has_role = std::any_of(options.rules.begin(), options.rules.end(), [](const std::string& id) {
    const Rule* const rule = find_rule(id);
    return rule && !rule->role.empty();
  });
  if (!has_role && options.values.empty()) return "";
  const Outcome outcome = run_in_process(
      [&](const Note&) {
        const zr_module& module = *Library(options.file).module();
        std::string problem = problem_of_rules(options, module);
        return problem.empty() ? problem_of_values(options, module) : problem;
      },
      std::min(options.time_limit, 10.0));
  if (outcome.verdict == Verdict::pass) return outcome.output;
  if (!has_role) return "";  // the rules find the reason
  return concat(options.file.string(), ": the components cannot be read: ", outcome.reason,
                "; check the file without --rule");
}

}  // namespace zr::conform
