#include "cli/explain_key.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/key_suggestion.hpp"

namespace zr::host::cli {

namespace {

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

std::string choices_text(const config::ConfigKey& key) {
  std::string text;
  for (const std::string& choice : key.choices) text += (text.empty() ? "" : ", ") + config::toml_text(choice);
  return text;
}

void add_groups(Rows& rows, const JobFile& job, const config::Entry& entry) {
  if (!entry.key.per_group) return;
  rows.emplace_back("groups", "a group in [[optimizer.groups]] can have its own value");
  for (const config::GroupConfig& group : job.config.groups())
    for (const config::Entry& override_entry : group.own) {
      if (override_entry.key.path() != entry.key.path()) continue;
      std::string match;
      for (const std::string& pattern : group.match) match += (match.empty() ? "" : ", ") + config::toml_text(pattern);
      rows.emplace_back("", fmt::format("{} for {} ({})", override_entry.written, match, override_entry.origin.text()));
    }
}

std::string text_of(const std::string& path, const Rows& rows) {
  std::string text = path + "\n";
  for (const auto& [name, value] : rows) text += fmt::format("  {:<9}{}\n", name, value);
  return text;
}

[[noreturn]] void fail_unknown(const JobFile& job, const std::string& path) {
  if (const std::string_view now = config::renamed(path); !now.empty())
    fail_user(fmt::format("zeroth explain: the key '{}' was renamed; write '{}'", path, now));
  std::vector<std::string> paths;
  std::string in_table;
  for (const config::Entry& entry : job.config.entries()) {
    paths.push_back(entry.key.path());
    if (entry.key.table == path) in_table += (in_table.empty() ? "" : ", ") + entry.key.name;
  }
  if (!in_table.empty())
    fail_user(fmt::format("zeroth explain: '{}' is a table; name one of its keys: {}", path, in_table));
  const std::string suggestion = config::key_suggestion(path, paths);
  fail_user(fmt::format("zeroth explain: unknown key '{}'{}{}", printable(path),
                        suggestion.empty() ? "; `zeroth explain FILE` lists all keys" : suggestion,
                        job.keys_known ? "" : " (--no-run: the keys of the program are not known)"));
}

}  // namespace

std::string explain_key(const JobFile& job, const std::string& path) {
  const std::string schema_path = path_in_schema(path);
  for (const config::UncheckedValue& entry : job.unchecked)
    if (entry.path == schema_path)
      return text_of(path, {{"value", entry.written},
                            {"origin", entry.origin.text()},
                            {"type", "not checked: possible key of the program, which was not started (--no-run)"}});
  const auto& entries = job.config.entries();
  const auto entry = std::find_if(entries.begin(), entries.end(),
                                  [&](const config::Entry& candidate) { return candidate.key.path() == schema_path; });
  if (entry == entries.end()) fail_unknown(job, path);
  const std::string range = entry->key.choices.empty() ? range_text(entry->key) : choices_text(entry->key);
  Rows rows{{"value", entry->written},
            {"origin", entry->origin.text()},
            {"type", std::string(config::type_text(entry->key.type))},
            {"range", range.empty() ? "any" : range},
            {"default", default_text(entry->key)},
            {"meaning", entry->key.meaning}};
  add_groups(rows, job, *entry);
  return text_of(path, rows);
}

}  // namespace zr::host::cli
