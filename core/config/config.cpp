#include "config/config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/value.hpp"

namespace zr::host::config {

namespace {

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  const std::string text = shortest(value);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

std::string line(const std::string& name, const Entry& entry) {
  // From any folder, the file gives the same paths.
  const std::string value = entry.given_path.text.empty() ? entry.written : toml_text(entry.value);
  std::string text = fmt::format("{} = {}", name, value);
  if (entry.origin.from == Origin::From::derived) text = fmt::format("# {}  (derived)", text);
  if (text.size() < 40) text.resize(40, ' ');
  return fmt::format("{}  # {}\n", text, entry.key.meaning);
}

std::string group_text(const GroupConfig& group) {
  std::string text = "\n[[optimizer.groups]]\nmatch = [";
  for (const auto& pattern : group.match) text += (&pattern == &group.match.front() ? "" : ", ") + toml_quoted(pattern);
  text += "]\n";
  if (!group.use.empty()) text += fmt::format("use = {}\n", toml_quoted(group.use));
  text += fmt::format("lr_scale = {}\n", float_text(group.lr_scale));
  for (const Entry& entry : group.given_values) text += fmt::format("{} = {}\n", entry.key.name, entry.written);
  return text;
}

}  // namespace

std::string Origin::text() const {
  switch (from) {
    case From::key_default: return "default";
    case From::file: return fmt::format("{}:{}:{}", file, line, column);
    case From::command_line: return "command line";
    case From::program: return "zr::Configuration";
    case From::derived: return "derived";
    case From::launcher: return "launcher";
  }
  fail_internal("unknown value of Origin::From");
}

std::string toml_text(const Value& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* as_int = std::get_if<int64_t>(&value)) return std::to_string(*as_int);
  if (const auto* real = std::get_if<double>(&value)) return float_text(*real);
  if (const auto* text = std::get_if<std::string>(&value)) return toml_quoted(*text);
  std::string list;
  if (const auto* patterns = std::get_if<std::vector<std::string>>(&value)) {
    for (const std::string& pattern : *patterns) list += (list.empty() ? "" : ", ") + toml_quoted(pattern);
  } else {
    for (const double number : std::get<std::vector<double>>(value))
      list += (list.empty() ? "" : ", ") + float_text(number);
  }
  return fmt::format("[{}]", list);
}

std::vector<const Entry*> JobConfig::table(std::string_view name) const {
  std::vector<const Entry*> entries;
  for (const Entry& entry : entries_)
    if (entry.key.table == name) entries.push_back(&entry);
  return entries;
}

std::vector<std::pair<std::string, std::vector<JobConfig::Row>>> JobConfig::tables() const {
  std::vector<std::pair<std::string, std::vector<Row>>> tables;
  for (const Entry& entry : entries_) {
    const bool role = entry.key.table.empty();
    const std::string& name = role ? entry.key.name : entry.key.table;
    auto at = std::find_if(tables.begin(), tables.end(), [&](const auto& table) { return table.first == name; });
    if (at == tables.end()) {
      const std::string root = name.substr(0, name.find('.'));
      const auto related = [&](const auto& table) { return table.first.substr(0, table.first.find('.')) == root; };
      const auto last = std::find_if(tables.rbegin(), tables.rend(), related).base();
      at = tables.insert(last == tables.begin() ? tables.end() : last, {name, {}});
    }
    at->second.push_back({role ? "use" : entry.key.name, &entry});
  }
  return tables;
}

std::string JobConfig::to_toml() const {
  std::string text;
  for (const auto& [table, rows] : tables()) {
    text += fmt::format("{}{}]\n", text.empty() ? "[" : "\n[", table);
    for (const Row& row : rows) text += line(row.name, *row.entry);
    if (table == "optimizer")
      for (const GroupConfig& group : groups_) text += group_text(group);
    if (table == "checkpoint" && !renames_.empty()) {
      text += "\n[checkpoint.rename]\n";
      for (const Rename& rename : renames_)
        text += fmt::format("{} = {}\n", toml_quoted(rename.ours), toml_quoted(rename.theirs));
    }
  }
  return text;
}

}  // namespace zr::host::config
