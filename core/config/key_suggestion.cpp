#include "config/key_suggestion.hpp"

#include "base/error.hpp"

namespace zr::host::config {

namespace {
std::string parent(const std::string& path) {
  return path.substr(0, path.rfind('.') == path.npos ? 0 : path.rfind('.'));
}

}  // namespace

std::string last_part(const std::string& path) { return path.substr(path.rfind('.') + 1); }

std::string join(const std::string& table, std::string_view name) {
  return table.empty() ? std::string(name) : table + "." + std::string(name);
}

std::string did_you_mean(const std::vector<std::string>& near) {
  std::string text;
  for (const auto& one : near) text += (text.empty() ? "; did you mean '" : " or '") + one + "'";
  return text + "?";
}

std::string key_suggestion(const std::string& path, const std::vector<std::string>& candidates) {
  const std::string table = parent(path), name = last_part(path);
  std::vector<std::string> siblings, homonyms, names;
  for (const auto& one : candidates) {
    if (parent(one) == table) siblings.push_back(last_part(one));
    if (last_part(one) == name) homonyms.push_back(one);
    names.push_back(last_part(one));
  }
  std::vector<std::string> near;
  for (const auto& one : all_nearest(name, siblings)) near.push_back(join(table, one));
  if (near.empty()) near = homonyms;  // right name, wrong table
  if (near.empty()) near = all_nearest(path, candidates);
  if (near.empty())
    for (const auto& one : candidates)
      if (last_part(one) == nearest(name, names)) near.push_back(one);
  if (!near.empty()) return did_you_mean(near);
  std::string there;
  for (const auto& one : siblings) there += (there.empty() ? "" : ", ") + one;
  if (there.empty()) return "";
  return table.empty() ? "; known names: " + there : "; [" + table + "] has " + there;
}

}  // namespace zr::host::config
