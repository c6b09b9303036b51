#include "config/names.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "config/deepspeed_schedule.hpp"
#include "config/key_suggestion.hpp"

namespace zr::host::config {

namespace {

// " (no strategy plug-in 'flatt' was found)" for the table [strategy.flatt]; "" for a table that is not a plug-in's.
std::string missing_plugin(const std::string& path) {
  const auto dot = path.find('.');
  const std::string role = path.substr(0, dot);
  const bool has_plugins = role == "offload" || std::find(roles().begin(), roles().end(), role) != roles().end();
  if (dot == path.npos || !has_plugins || path.find('.', dot + 1) != path.npos) return "";
  return fmt::format(" (no {} plug-in '{}' was found)", role, path.substr(dot + 1));
}

}  // namespace

Names::Names(const Document::Tree& tree, const std::map<std::string, std::string>& chosen, const PluginIds& not_loaded,
             std::vector<UncheckedValue>* unchecked, Problems& problems)
    : tree_(tree), chosen_(chosen), not_loaded_(not_loaded), unchecked_(unchecked), problems_(problems) {
  for (const auto& [role, id] : chosen_)
    if (id.find('/') == id.npos) insert_table(fmt::format("{}.{}", role, id));
}

void Names::declare(const ConfigKey& key) {
  const std::string bad = declaration_problem(key);
  if (!bad.empty()) fail_internal(bad);
  const bool role = key.table.empty() && std::find(roles().begin(), roles().end(), key.name) != roles().end();
  if (key.table.empty() && !role)
    fail_internal(fmt::format("the key '{}' has no table; declare it as \"table.key\"", key.name));
  const std::string path = role ? key.name + ".use" : key.path();
  if (!paths_.insert(path).second) fail_internal(fmt::format("the key '{}' is declared twice", path));
  insert_table(role ? key.name : key.table);
}

void Names::declare_table(const std::string& role, const std::string& id) { insert_table(join(role, id)); }

// An id may have two parts: [optimizer.acme.lion] is inside the table optimizer.acme.
void Names::insert_table(std::string table) {
  while (!table.empty()) {
    tables_.insert(table);
    const auto dot = table.rfind('.');
    table.resize(dot == table.npos ? 0 : dot);
  }
}

void Names::check(const toml::table& table, const std::string& path) {
  for (const auto& [key, node] : table) {
    const std::string here = join(path, key.str());
    if (paths_.count(here) || here == "optimizer.groups" || here == "checkpoint.rename") continue;
    const bool role = path.empty() && chosen_.count(here);
    if (key.str().find('.') != std::string_view::npos) {
      problems_.add(key_origin(key, node),
                    fmt::format("the key \"{}\" is in quotes although its dot separates names; write {} without quotes",
                                key.str(), node.is_table() ? fmt::format("[{}]", here) : here));
      continue;
    }
    if (is_not_loaded(here)) continue;
    if (node.is_table() && (contains_not_loaded(here) || tables_.count(here))) {
      check(*node.as_table(), here);
    } else if (tables_.count(here) && !role) {
      problems_.add(key_origin(key, node), fmt::format("'{}' is a table; write [{}] and its keys below", here, here));
    } else if (!role && unchecked_ && !deepspeed_schedule_problem(tree_.root, here)) {
      gather_unchecked(key, node, here);
    } else if (!role) {
      unknown(key, node, here);
    }
  }
}

bool Names::is_not_loaded(const std::string& path) const {
  const auto dot = path.find('.');
  const auto at = not_loaded_.find(path.substr(0, dot));
  return dot != path.npos && at != not_loaded_.end() &&
         std::find(at->second.begin(), at->second.end(), path.substr(dot + 1)) != at->second.end();
}

bool Names::contains_not_loaded(const std::string& path) const {
  for (const auto& [role, ids] : not_loaded_)
    for (const std::string& id : ids)
      if (join(role, id).rfind(path + ".", 0) == 0 && path.find('.') != path.npos) return true;
  return false;
}

void Names::gather_unchecked(const toml::key& key, const toml::node& node, const std::string& path) {
  if (const toml::table* table = node.as_table()) {
    for (const auto& [inner, value] : *table) gather_unchecked(inner, value, join(path, inner.str()));
    return;
  }
  const auto raw = tree_.overrides.find(path);
  unchecked_->push_back({path, raw == tree_.overrides.end() ? source_text(node) : raw->second, key_origin(key, node)});
}

void Names::unknown(const toml::key& key, const toml::node& node, const std::string& path) {
  const Origin origin = key_origin(key, node);
  const bool is_table = node.is_table() || node.is_array_of_tables();
  if (problems_.full()) return problems_.add(origin, "");  // finding the nearest name is slow
  if (const auto problem = deepspeed_schedule_problem(tree_.root, path))
    return problem->empty() ? void() : problems_.add(origin, *problem);
  std::vector<std::string> candidates(tables_.begin(), tables_.end());
  for (const auto& [role, ids] : not_loaded_)
    for (const auto& id : ids) candidates.push_back(join(role, id));
  if (!is_table || path.rfind("optimizer.", 0) == 0) {
    candidates.insert(candidates.end(), paths_.begin(), paths_.end());
    candidates.push_back("optimizer.groups");
    candidates.push_back("checkpoint.rename");
  }
  problems_.add(origin, fmt::format("unknown {} '{}'{}{}", is_table ? "table" : "key", path,
                                    node.is_table() ? missing_plugin(path) : "", key_suggestion(path, candidates)));
}

}  // namespace zr::host::config
