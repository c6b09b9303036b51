#include "config/key_suggestion.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "config/foreign_keys.hpp"

namespace zr::host::config {

namespace {
std::string parent(const std::string& path) {
  return path.substr(0, path.rfind('.') == path.npos ? 0 : path.rfind('.'));
}

}  // namespace

std::string last_part(const std::string& path) { return path.substr(path.rfind('.') + 1); }

std::string join(const std::string& table, std::string_view name) {
  return table.empty() ? std::string(name) : fmt::format("{}.{}", table, name);
}

std::string did_you_mean(const std::vector<std::string>& near) {
  std::string text;
  for (const auto& candidate : near)
    text += fmt::format("{}{}'", text.empty() ? "; did you mean '" : " or '", candidate);
  return text + "?";
}

std::string key_suggestion(const std::string& path, const std::vector<std::string>& candidates) {
  const std::string table = parent(path), name = last_part(path);
  std::vector<std::string> siblings, homonyms, names;
  for (const auto& candidate : candidates) {
    if (parent(candidate) == table) siblings.push_back(last_part(candidate));
    if (last_part(candidate) == name) homonyms.push_back(candidate);
    names.push_back(last_part(candidate));
  }
  if (const std::string_view remedy = foreign_remedy(path); !remedy.empty())
    return fmt::format("; {}{}", remedy, homonyms.empty() ? "" : did_you_mean(homonyms));
  std::vector<std::string> near;
  for (const auto& candidate : all_nearest(name, siblings)) near.push_back(join(table, candidate));
  if (near.empty()) near = homonyms;  // right name, wrong table
  if (near.empty()) near = all_nearest(path, candidates);
  if (near.empty())
    for (const auto& candidate : candidates)
      if (last_part(candidate) == nearest(name, names)) near.push_back(candidate);
  if (!near.empty()) return did_you_mean(near);
  std::string names_in_table;
  for (const auto& candidate : siblings) names_in_table += (names_in_table.empty() ? "" : ", ") + candidate;
  if (names_in_table.empty()) return "";
  return table.empty() ? "; known names: " + names_in_table : fmt::format("; [{}] has {}", table, names_in_table);
}

}  // namespace zr::host::config
