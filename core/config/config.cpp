#include "config/config.hpp"

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
  std::string text = name + " = " + entry.written;
  if (entry.origin.from == Origin::From::derived) text = "# " + text + "  (derived)";
  if (text.size() < 40) text.resize(40, ' ');
  return text + "  # " + entry.key.meaning + "\n";
}

std::string group_text(const GroupConfig& group) {
  std::string text = "\n[[optimizer.groups]]\nmatch = [";
  for (const auto& pattern : group.match) text += (&pattern == &group.match.front() ? "" : ", ") + toml_quoted(pattern);
  text += "]\nlr_scale = " + float_text(group.lr_scale) + "\n";
  for (const Entry& entry : group.own) text += entry.key.name + " = " + entry.written + "\n";
  return text;
}

}  // namespace

std::string Origin::text() const {
  switch (from) {
    case From::key_default: return "default";
    case From::file: return file + ":" + std::to_string(line) + ":" + std::to_string(column);
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
  for (const double one : std::get<std::vector<double>>(value)) list += (list.empty() ? "" : ", ") + float_text(one);
  return "[" + list + "]";
}

std::vector<const Entry*> JobConfig::table(std::string_view name) const {
  std::vector<const Entry*> all;
  for (const Entry& entry : entries_)
    if (entry.key.table == name) all.push_back(&entry);
  return all;
}

std::vector<std::pair<std::string, std::vector<JobConfig::Row>>> JobConfig::tables() const {
  std::vector<std::pair<std::string, std::vector<Row>>> all;
  for (const Entry& entry : entries_) {
    const bool role = entry.key.table.empty();
    const std::string& name = role ? entry.key.name : entry.key.table;
    auto at = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.first == name; });
    if (at == all.end()) {
      const std::string root = name.substr(0, name.find('.'));
      const auto related = [&](const auto& one) { return one.first.substr(0, one.first.find('.')) == root; };
      const auto last = std::find_if(all.rbegin(), all.rend(), related).base();
      at = all.insert(last == all.begin() ? all.end() : last, {name, {}});
    }
    at->second.push_back({role ? "use" : entry.key.name, &entry});
  }
  return all;
}

std::string JobConfig::to_toml() const {
  std::string text;
  for (const auto& [table, rows] : tables()) {
    text += (text.empty() ? "[" : "\n[") + table + "]\n";
    for (const Row& row : rows) text += line(row.name, *row.entry);
    if (table == "optimizer")
      for (const GroupConfig& group : groups_) text += group_text(group);
    if (table == "checkpoint" && !renames_.empty()) {
      text += "\n[checkpoint.rename]\n";
      for (const Rename& rename : renames_)
        text += toml_quoted(rename.ours) + " = " + toml_quoted(rename.theirs) + "\n";
    }
  }
  return text;
}

}  // namespace zr::host::config
