#include "cli/job_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "cli/trainer.hpp"
#include "plugin/plugin_selection.hpp"

namespace zr::host::cli {

JobFile validate_file(const std::string& file, const std::vector<std::string>& overrides,
                      const plugin::Registry& registry, const std::filesystem::path& bin, bool run) {
  config::Document document = file.empty() ? config::Document::parse("", "zeroth explain", overrides, {}, "job")
                                           : config::Document::load(file, overrides);
  JobFile job{file, overrides, {}, true, {}, {}};
  plugin::PluginSelection selection = select_plugins(document, registry, document.ranks());
  const config::Setting<std::string> program = document.program();
  if (!program->empty()) {
    job.program = find_trainer(program, file, bin);
    job.keys_known = run;
    const auto keys =
        run ? query_keys(job.program, file, location_of_program(program)) : std::vector<config::ConfigKey>{};
    selection.keys.insert(selection.keys.end(), keys.begin(), keys.end());
  }
  try {
    job.config =
        document.check(selection.keys, 0, selection.not_loaded, run ? nullptr : &job.unchecked, selection.unselected);
  } catch (const Error& failure) {
    if (!job.program.empty() || file.empty()) throw;
    fail_like(failure,
              fmt::format("{}\n{}: job.program is not set, so tables that belong to a program are unknown keys",
                          failure.what(), file));
  }
  return job;
}

namespace {

using Cells = std::vector<std::string>;

// Each column is as wide as its widest cell; two spaces between columns, no trailing spaces.
std::string aligned(const std::vector<Cells>& rows, const std::string& indent) {
  std::vector<std::size_t> widths;
  for (const Cells& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (widths.size() <= i) widths.resize(i + 1);
      if (row.size() > 1) widths[i] = std::max(widths[i], row[i].size());
    }
  std::string text;
  for (const Cells& row : rows) {
    std::string line = row.size() == 1 ? row[0] : indent;
    for (std::size_t i = 0; row.size() > 1 && i < row.size(); ++i)
      line += row[i] + std::string(i + 1 < row.size() ? widths[i] - row[i].size() + 2 : 0, ' ');
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string bare_default(const config::ConfigKey& key) {
  if (key.def.empty()) return "required";
  return key.def[0] == '@' ? "as " + key.def.substr(1) : key.def;
}

// A type of device, and the component of a library for it.
using OnDevice = std::pair<std::string, plugin::Component>;

// on_devices: the libraries for devices that have the same component; only_there: `one` is the first of them.
std::string plugin_text(const plugin::Component& one, const std::vector<OnDevice>& on_devices = {},
                        bool only_there = false) {
  std::string text =
      fmt::format("{} '{}' {}  ({}, ABI built {}.{}, needs {}.{}; {}, {})\n  {}\n", role_of(one), one.table->id,
                  printable(one.table->version), one.table->kind, ZR_ABI_MAJOR, one.module->built_minor, ZR_ABI_MAJOR,
                  one.module->need_minor, printable(one.module->vendor), printable(one.module->build),
                  printable(one.file.string()));
  std::string about;
  for (const char* part : {one.table->description, one.table->license, one.table->url})
    if (part && *part) about += (about.empty() ? "" : ", ") + printable(part);
  if (!about.empty()) text += fmt::format("  {}\n", about);
  for (const auto& [device, component] : on_devices)
    text += fmt::format("  {}for job.device = \"{}\": {}\n", only_there ? "only " : "also ", device,
                        printable(component.file.string()));
  std::vector<Cells> rows;
  const std::string table = fmt::format("{}.{}", role_of(one), one.table->id);
  for (const config::ConfigKey& key : config::keys_of(one.table->keys, one.table->n_keys, table))
    rows.push_back({key.name, std::string(config::type_text(key)), bare_default(key), range_text(key),
                    key.meaning + (key.per_group ? " (also per group)" : "")});
  return text + aligned(rows, "    ");
}

}  // namespace

std::string explain(const JobFile& job) {
  const int ranks = job.config.job().ranks;
  std::vector<Cells> rows{{fmt::format("{}: {}{}{}", job.file, ranks, ranks == 1 ? " rank" : " ranks",
                                       job.program.empty() ? "" : " of " + job.program.string())}};
  for (const auto& [table, lines] : job.config.tables()) {
    rows.push_back({""});
    rows.push_back({fmt::format("[{}]", table)});
    for (const auto& [name, entry] : lines)
      rows.push_back({name, entry->written, entry->origin.text(), entry->key.meaning});
    if (table != "optimizer") continue;
    for (const config::GroupConfig& group : job.config.groups()) {
      rows.push_back({"[[optimizer.groups]]"});
      rows.push_back({"match", config::toml_text(group.match), group.origin.text(),
                      "patterns for parameter names; a parameter belongs to the first group that matches"});
      if (!group.use.empty())
        rows.push_back({"use", config::toml_text(group.use), group.origin.text(), "optimizer that updates the group"});
      rows.push_back({"lr_scale", config::toml_text(group.lr_scale), group.origin.text(),
                      "learning rate of the group, as a multiple of optimizer.lr"});
      for (const config::Entry& given : group.given_values)
        rows.push_back({given.key.name, given.written, given.origin.text(), given.key.meaning});
    }
  }
  const std::string unchecked = unchecked_text(job.unchecked);
  return aligned(rows, "  ") + (unchecked.empty() ? "" : "\n" + unchecked);
}

std::string unchecked_text(const std::vector<config::UncheckedValue>& unchecked) {
  if (unchecked.empty()) return "";
  std::vector<Cells> rows{{"not checked: possible keys of the program, which was not started (--no-run)"}};
  for (const config::UncheckedValue& one : unchecked)
    rows.push_back({printable(one.path), one.written, one.origin.text()});
  return aligned(rows, "  ");
}

// Several files can have the same component.
std::vector<config::ConfigKey> plugin_keys(const plugin::Registry& registry) {
  std::vector<config::ConfigKey> keys;
  std::set<std::string> paths;
  for (const plugin::PluginValidation& file : registry.list())
    for (const plugin::Component& component : file.components) {
      const std::string table = fmt::format("{}.{}", role_of(component), component.table->id);
      for (config::ConfigKey& key : config::keys_of(component.table->keys, component.table->n_keys, table))
        if (paths.insert(key.path()).second) keys.push_back(std::move(key));
    }
  return keys;
}

namespace {

using RoleAndId = std::pair<std::string, std::string>;

RoleAndId role_and_id_of(const plugin::Component& one) { return {std::string(role_of(one)), one.table->id}; }

// The optimizers and communicators of the files for devices. If several files for a device have the same component, the
// first.
std::map<RoleAndId, std::vector<OnDevice>> components_on_devices(const std::vector<DevicePlugins>& of_devices) {
  std::map<RoleAndId, std::vector<OnDevice>> on_devices;
  for (const auto& [device, files] : of_devices)
    for (const plugin::PluginValidation& file : files)
      for (const plugin::Component& component : file.components)
        if (role_of(component) == name_of(plugin::Role::optimizer) ||
            role_of(component) == name_of(plugin::Role::communicator))
          if (auto& same = on_devices[role_and_id_of(component)]; same.empty() || same.back().first != device)
            same.emplace_back(device, component);
  return on_devices;
}

}  // namespace

std::string list_text(const std::vector<plugin::PluginValidation>& validations,
                      const std::vector<DevicePlugins>& of_devices) {
  std::string accepted, rejected;
  const auto add_problems = [&](const plugin::PluginValidation& one, const std::string& subject) {
    if (!one.hint.empty()) accepted += fmt::format("  {}found by its absolute path only: {}\n", subject, one.hint);
    for (const std::string& warning : one.warnings) accepted += fmt::format("  {}warning: {}\n", subject, warning);
    if (!one.accepted) rejected += fmt::format("rejected: {}\n    {}\n", printable(one.file.string()), one.reason);
  };
  std::map<RoleAndId, std::vector<OnDevice>> on_devices = components_on_devices(of_devices);
  for (const plugin::PluginValidation& one : validations) {
    for (const plugin::Component& component : one.components) {
      const auto same = on_devices.extract(role_and_id_of(component));
      accepted += plugin_text(component, same ? same.mapped() : std::vector<OnDevice>{});
    }
    add_problems(one, "");
  }
  for (const auto& [key, libraries] : on_devices) accepted += plugin_text(libraries[0].second, libraries, true);
  for (const auto& [device, files] : of_devices)
    for (const plugin::PluginValidation& file : files) add_problems(file, printable(file.file.string()) + ": ");
  return accepted + rejected;
}

}  // namespace zr::host::cli
