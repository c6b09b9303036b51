#include "cli/explain_key.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/key_suggestion.hpp"

namespace zr::host::cli {

namespace {

constexpr const char *kGroups = "optimizer.groups", *kRename = "checkpoint.rename";

using Rows = std::vector<std::pair<std::string, std::string>>;

// A role's plug-in is the key "strategy", which a file can also set as [strategy] use.
std::string path_in_schema(const std::string& path) {
  for (const std::string& role : config::roles())
    if (path == role + ".use") return role;
  return path;
}

std::string default_text(const config::ConfigKey& key) {
  if (key.def.empty()) return "none; the key is required";
  return key.def[0] == '@' ? "the value of " + key.def.substr(1) : key.def;
}

// The elements of the TOML array, without its brackets.
std::string elements_text(const std::vector<std::string>& array) {
  const std::string text = config::toml_text(array);
  return text.substr(1, text.size() - 2);
}

void add_groups(Rows& rows, const JobFile& job, const config::Entry& entry) {
  if (!entry.key.per_group) return;
  rows.emplace_back("groups", "a group in [[optimizer.groups]] can have its own value");
  for (const config::GroupConfig& group : job.config.groups())
    for (const config::Entry& given : group.given_values) {
      if (given.key.path() != entry.key.path()) continue;
      rows.emplace_back("",
                        fmt::format("{} for {} ({})", given.written, elements_text(group.match), given.origin.text()));
    }
}

std::string text_of(const std::string& path, const Rows& rows) {
  std::string text = path + "\n";
  for (const auto& [name, value] : rows) text += fmt::format("  {:<9}{}\n", name, value);
  return text;
}

// Type, range, default and meaning.
void add_declaration(Rows& rows, const config::ConfigKey& key) {
  const std::string range = key.choices.empty() ? range_text(key) : elements_text(key.choices);
  rows.emplace_back("type", config::type_text(key));
  rows.emplace_back("range", range.empty() ? "any" : range);
  rows.emplace_back("default", default_text(key));
  rows.emplace_back("meaning", key.meaning);
}

// The table [[optimizer.groups]], whose keys are not in the schema.
Rows groups_rows(const JobFile& job) {
  Rows rows;
  for (const config::GroupConfig& group : job.config.groups()) {
    std::string text = fmt::format("match = {}, {}lr_scale = {}", config::toml_text(group.match),
                                   group.use.empty() ? "" : fmt::format("use = {}, ", config::toml_text(group.use)),
                                   config::toml_text(group.lr_scale));
    for (const config::Entry& given : group.given_values)
      text += fmt::format(", {} = {}", given.key.name, given.written);
    rows.emplace_back("value", text);
    rows.emplace_back("origin", group.origin.text());
  }
  if (rows.empty()) rows.emplace_back("value", "no groups");
  std::vector<std::string> keys{"match", "use", "lr_scale"};
  for (const config::Entry& entry : job.config.entries())  // two optimizers may have the same key
    if (entry.key.per_group && std::ranges::find(keys, entry.key.name) == keys.end()) keys.push_back(entry.key.name);
  rows.emplace_back("type", "array of tables");
  rows.emplace_back("keys", fmt::format("{}", fmt::join(keys, ", ")));
  rows.emplace_back("meaning", "values for parameters whose names match; the first matching group wins");
  return rows;
}

// The table [checkpoint.rename], whose keys are names of parameters.
Rows rename_rows(const JobFile& job) {
  Rows rows;
  for (const config::Rename& rename : job.config.renames()) {
    rows.emplace_back("value",
                      fmt::format("{} = {}", config::toml_text(rename.ours), config::toml_text(rename.theirs)));
    rows.emplace_back("origin", rename.origin.text());
  }
  if (rows.empty()) rows.emplace_back("value", "no names");
  rows.emplace_back("type", "table");
  rows.emplace_back("keys", "names in the model, or patterns; exact names win over patterns, longer over shorter ones");
  rows.emplace_back("meaning", "names of the same weights in files of other programs; `*` matches the same in both");
  return rows;
}

const config::Entry* find_entry(const JobFile& job, const std::string& path) {
  for (const config::Entry& entry : job.config.entries())
    if (entry.key.path() == path) return &entry;
  return nullptr;
}

// The keys of schedules and plug-ins that the file does not select, if `path` may be one of them. Loads all plug-ins if
// it may be a key of a plug-in.
std::vector<config::ConfigKey> unused_keys(const JobFile& job, const plugin::Registry& registry,
                                           const std::string& path) {
  std::vector<config::ConfigKey> keys;
  if (path.starts_with("schedule.")) keys = config::host_keys();
  for (const plugin::Role role :
       {plugin::Role::strategy, plugin::Role::optimizer, plugin::Role::communicator, plugin::Role::offload})
    if (path.starts_with(std::string(name_of(role)) + "."))
      for (config::ConfigKey& key : plugin_keys(registry)) keys.push_back(std::move(key));
  std::erase_if(keys, [&](const config::ConfigKey& key) { return find_entry(job, key.path()) != nullptr; });
  return keys;
}

// Why the file does not use a key of unused_keys().
std::string reason_unused(const JobFile& job, const config::ConfigKey& key) {
  const auto dot = key.table.find('.');
  const std::string table = key.table.substr(0, dot), id = key.table.substr(dot + 1);
  if (table == name_of(plugin::Role::offload)) return fmt::format("no key of [offload] selects the tier \"{}\"", id);
  const std::string selector = table == "schedule" ? "schedule.use" : table;
  const config::Entry* selection = find_entry(job, selector);
  if (!selection) fail_internal(fmt::format("no key selects the table of '{}'", key.path()));
  if (table == name_of(plugin::Role::communicator) && job.config.job().ranks == 1)
    return "a job of one rank has no communicator";
  return fmt::format("{} = {} ({})", selector, selection->written, selection->origin.text());
}

[[noreturn]] void fail_unknown(const JobFile& job, const std::vector<config::ConfigKey>& unused,
                               const std::string& path) {
  std::vector<std::string> paths, names_in_table;
  const auto add = [&](const config::ConfigKey& key) {
    paths.push_back(key.path());
    if (key.table == path) names_in_table.push_back(key.name);
  };
  for (const config::Entry& entry : job.config.entries()) add(entry.key);
  for (const config::ConfigKey& key : unused) add(key);
  paths.insert(paths.end(), {kGroups, kRename});
  if (!names_in_table.empty())
    fail_user(fmt::format("zeroth explain: '{}' is a table; name one of its keys: {}", path,
                          fmt::join(names_in_table, ", ")));
  const std::string suggestion = config::key_suggestion(path, paths);
  fail_user(fmt::format("zeroth explain: unknown key '{}'{}{}", printable(path),
                        suggestion.empty() ? "; `zeroth explain FILE` lists all keys" : suggestion,
                        job.keys_known ? "" : " (--no-run: the keys of the program are not known)"));
}

}  // namespace

std::string explain_key(const JobFile& job, const plugin::Registry& registry, const std::string& path) {
  const std::string schema_path = path_in_schema(path);
  for (const config::UncheckedValue& value : job.unchecked)
    if (value.path == schema_path)
      return text_of(path, {{"value", value.written},
                            {"origin", value.origin.text()},
                            {"type", "not checked: possible key of the program, which was not started (--no-run)"}});
  if (path == kGroups) return text_of(path, groups_rows(job));
  if (path == kRename) return text_of(path, rename_rows(job));
  Rows rows;
  if (const config::Entry* entry = find_entry(job, schema_path)) {
    const std::string value = entry->given_path.text.empty() ? entry->written : config::toml_text(entry->value);
    rows = {{"value", value}, {"origin", entry->origin.text()}};
    add_declaration(rows, entry->key);
    add_groups(rows, job, *entry);
    return text_of(path, rows);
  }
  const std::vector<config::ConfigKey> unused = unused_keys(job, registry, path);
  const auto key = std::find_if(unused.begin(), unused.end(),
                                [&](const config::ConfigKey& candidate) { return candidate.path() == path; });
  if (key == unused.end()) fail_unknown(job, unused, path);
  rows = {{"value", "not used, because " + reason_unused(job, *key)}};
  add_declaration(rows, *key);
  return text_of(path, rows);
}

}  // namespace zr::host::cli
